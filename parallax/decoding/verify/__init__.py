"""Acceptance rules. One file each; every class says what it guarantees and for which kinds of draft."""

from parallax.decoding.base import Verifier
from parallax.decoding.verify.follow import Follow
from parallax.decoding.verify.judge import Judge, Judgement
from parallax.decoding.verify.rejection import Rejection

VERIFIERS: dict[str, type[Verifier]] = {
    "follow": Follow,
    "rejection": Rejection,
}

__all__ = ["Follow", "Judge", "Judgement", "Rejection", "VERIFIERS"]
