"""Speculative sampling, one token after the other. B sequences, T nodes, V vocabulary."""

from __future__ import annotations

import jax.numpy as jnp

from parallax.decoding.base import policy
from parallax.decoding.verify.judge import (
    Judge,
    Judgement,
    descend,
    log_residual,
    normalised,
    row,
    without,
)


@policy
class Rejection(Judge):
    """Keep a drafted token with probability p / q, replace the first that falls by the residual.

    p is the target's law, q the draft's, both after their warpers. Token d is kept if u q(d) < p(d); the first that is
    not is drawn anew from [p - q]+, normalised, and if all are kept one more comes from p. So every token has law p,
    and a token is kept with probability sum min(p, q), the most that any rule can reach for one token. The text
    depends on the draft length as well as on the seed: only its law is that of plain decoding.

    In a tree the next sibling takes the place of the one that fell: it is judged by the residual as p, and, if siblings
    were drawn without replacement, by q without the tokens before it, normalised.
    Source: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318); trees: SpecInfer (arXiv:2305.09781),
    without replacement: RSD (arXiv:2402.14160).
    """

    def judge(self, draft, logp, uniform):
        def arrive(node):
            return row(logp, node), row(draft.logq, node)

        def chance(state, token):
            p, q = (jnp.take_along_axis(law, token[:, None], 1)[:, 0] for law in state)
            return jnp.exp(jnp.minimum(p - q, 0))

        def reject(state, token):
            p, q = state
            return normalised(log_residual(p, q), p), q if draft.replacement else without(q, token)

        node, (p, _), chances = descend(draft, uniform, arrive, chance, reject)
        return Judgement(node, jnp.exp(p), chances)
