"""K-SEQ: independent siblings under one threshold. B sequences, T nodes, V vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from parallax.decoding.base import policy
from parallax.decoding.verify.judge import (
    Judge,
    Judgement,
    descend,
    drawn,
    independent,
    parents_of,
    residual,
    row,
)

STEPS = 40                               # halvings of [1, K]: below the rounding of float64 for any K that one drafts


@policy
class KSeq(Judge):
    """Keep the first of K independent siblings that passes p / (rho q), level by level.

    With beta = sum min(q, p / rho), the chance that one sibling passes, some sibling passes with 1 - (1 - beta)^K, and
    if none does the token comes from p - min(q, p / rho) (1 - (1 - beta)^K) / beta, normalised. That is a law if rho is
    at least rho*, where 1 - (1 - beta)^K = rho beta; there a sibling is accepted most often. K counts the valid
    children of a node, so rho* is found at every node that is reached, by halving [1, K].

    Attributes:
      rho: 0 takes rho*. Else at least 1; the rule uses it where it is above rho*, so K of the widest node is always
        that of the paper's simplest form.

    Source: SpecTr (Sun et al., arXiv:2310.15141).
    """

    rho: float = 0.0

    def __post_init__(self):
        if isinstance(self.rho, (int, float)) and self.rho != 0 and not self.rho >= 1:
            raise ValueError(f"rho must be 0 (the best one) or at least 1, got {self.rho}")

    def check(self, source):
        super().check(source)
        independent(self, source)

    def judge(self, draft, logp, uniform):
        live, parents = drawn(draft), parents_of(draft)
        child = live & (jnp.arange(live.shape[1]) > 0)

        def arrive(node):
            p, q = row(logp, node), row(draft.logq, node)
            count = (child & (parents == node[:, None])).sum(1).astype(p.dtype)
            return p, q, self._threshold(jnp.exp(p), jnp.exp(q), count), count

        def chance(state, token):
            p, q = (jnp.take_along_axis(law, token[:, None], 1)[:, 0] for law in state[:2])
            return jnp.exp(jnp.minimum(p - q - jnp.log(state[2]), 0))

        node, (p, q, rho, count), chances = descend(draft, uniform, arrive, chance, lambda state, token: state)
        p, kept = jnp.exp(p), jnp.minimum(jnp.exp(q), jnp.exp(p) / rho[:, None])
        beta = jnp.clip(kept.sum(-1), 0, 1)
        share = jnp.where(beta > 0, passing(beta, count) / jnp.where(beta > 0, beta, 1), 0)
        return Judgement(node, residual(p, kept * share[:, None]), chances)

    def _threshold(self, p, q, count):
        """rho [B], at least rho*: from the upper end, where the residual is a law in spite of rounding."""
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) / 2
            beta = jnp.clip(jnp.minimum(q, p / middle[:, None]).sum(-1), 0, 1)
            enough = passing(beta, count) <= middle * beta
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        least = jnp.ones_like(count)
        _, best = lax.fori_loop(0, STEPS, halve, (least, jnp.maximum(count, least)))
        return jnp.maximum(best, jnp.asarray(self.rho, best.dtype))


def passing(beta, count):
    """1 - (1 - beta)^count."""
    return -jnp.expm1(count * jnp.log1p(-jnp.minimum(beta, 1)))
