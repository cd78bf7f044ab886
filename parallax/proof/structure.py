"""What must hold of every decoder whatever it claims: the invariants of `parallax.testing`."""

from __future__ import annotations

from parallax.decoding.base import Decoder
from parallax.proof.record import TARGET, Record
from parallax.proof.subjects import Subject
from parallax.proof.tokens import subject_case
from parallax.testing import CHECKS

# Equality has a check of its own, with numbers. The quick selection shares four compiled programs.
ALL = tuple(name for name in CHECKS if name != "equals_plain_decoding")
QUICK = ("every_step", "batch_independence", "no_recompilation", "end_of_text", "limits", "tree_mask")

SAMPLED = ", sampled"                 # behind the name of an invariant that was checked once more, with a temperature


def invariant(subject: Subject, decoder: Decoder, name: str) -> Record:
    """One of `CHECKS`. Raises AssertionError saying what was violated."""
    CHECKS[name](decoder, subject_case(subject))
    return Record(TARGET, subject.label, subject.verifier, decoder.guarantee, name, True)
