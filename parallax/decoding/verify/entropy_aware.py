"""Entropy-aware rejection. B sequences, T nodes, V vocabulary."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from parallax.decoding import tree, warpers
from parallax.decoding.base import Guarantee, policy, static
from parallax.decoding.verify.judge import Judgement
from parallax.decoding.verify.rejection import Rejection
from parallax.decoding.verify.relaxed import behind, checked


@policy
class EntropyAware(Rejection):
    """`Rejection`, that also drops a kept token where both models are unsure of the same tokens.

    Unsure: the entropies of p and of q are above their thresholds, in nats, and of the `best` most likely tokens of
    each a share of at least `overlap` is the same. Instead of the first such token one more is drawn from p without it,
    so the law is not that of the target. An infinite threshold gives `Rejection`, to the bit.
    Source: EASD, entropy-aware speculative decoding, of which the abstract was available: thresholds and the law of the
    redrawn token are ours.
    """

    p_entropy: float = 2.0
    q_entropy: float = 2.0
    overlap: float = 0.8
    best: int = static(default=10)

    guarantee: ClassVar[Guarantee] = "lossy"

    def __post_init__(self):
        checked("p_entropy", self.p_entropy, 0, float("inf"), "at least 0")
        checked("q_entropy", self.q_entropy, 0, float("inf"), "at least 0")
        checked("overlap", self.overlap, 0, 1, "in [0, 1]")
        checked("best", self.best, 1, float("inf"), "at least 1")

    def judge(self, draft, logp, uniform):
        kept = super().judge(draft, logp, uniform)
        rows = draft.logq.shape[1]
        unsure = warpers.entropy(logp)[:, :rows, 0] > self.p_entropy
        unsure &= (warpers.entropy(draft.logq)[..., 0] > self.q_entropy) & self._alike(logp[:, :rows], draft.logq)
        unsure = jnp.pad(unsure, ((0, 0), (0, logp.shape[1] - rows)))
        above = jnp.asarray(tree.ancestors(draft.parents, draft.depth))
        above = jnp.broadcast_to(above, (*draft.tokens.shape, logp.shape[1]))
        path = jnp.take_along_axis(above, kept.node[:, None, None], 1)[:, 0].at[:, 0].set(False)
        falls = path & behind(draft, unsure)
        first = jnp.argmax(falls, 1)[:, None]                                  # of a path, the lowest index is the top
        node = jnp.take_along_axis(jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape), first, 1)
        p = jnp.exp(jnp.take_along_axis(logp, node[..., None], 1)[:, 0])
        rest = jnp.where(jnp.arange(p.shape[1]) == jnp.take_along_axis(draft.tokens, first, 1), 0, p)
        rest = jnp.where(rest.any(-1, keepdims=True), rest, p)                 # p may be certain of the token
        some = falls.any(1)
        return Judgement(jnp.where(some, node[:, 0], kept.node).astype(jnp.int32),
                         jnp.where(some[:, None], rest, kept.weights), kept.chances)

    def _alike(self, p, q):
        """Whether enough of the most likely tokens of both are the same."""
        count = min(self.best, p.shape[-1])
        ours, theirs = (lax.top_k(law, count)[1] for law in (p, q))
        shared = (ours[..., :, None] == theirs[..., None, :]).any(-1).sum(-1)
        return shared >= self.overlap * count
