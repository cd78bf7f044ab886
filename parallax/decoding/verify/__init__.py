"""Acceptance rules. One file each; every class says what it guarantees and for which kinds of draft."""

from parallax.decoding.base import Verifier
from parallax.decoding.verify.block import Block
from parallax.decoding.verify.dropout import Dropout
from parallax.decoding.verify.entropy_aware import EntropyAware
from parallax.decoding.verify.follow import Follow
from parallax.decoding.verify.judge import Judge, Judgement
from parallax.decoding.verify.kseq import KSeq
from parallax.decoding.verify.multipath import MultiPath
from parallax.decoding.verify.rejection import Rejection
from parallax.decoding.verify.relaxed import Distance, MinBlock, NearBest, Relaxed, TopK, Typical
from parallax.decoding.verify.traversal import Traversal

VERIFIERS: dict[str, type[Verifier]] = {
    "follow": Follow,
    "rejection": Rejection,
    "kseq": KSeq,
    "block": Block,
    "traversal": Traversal,
    "multipath": MultiPath,
    "typical": Typical,
    "top_k": TopK,
    "distance": Distance,
    "min_block": MinBlock,
    "relaxed": NearBest,
    "entropy_aware": EntropyAware,
    "dropout": Dropout,
}

__all__ = ["Block", "Distance", "Dropout", "EntropyAware", "Follow", "Judge", "Judgement", "KSeq", "MinBlock",
           "MultiPath", "NearBest", "Rejection", "Relaxed", "TopK", "Traversal", "Typical", "VERIFIERS"]
