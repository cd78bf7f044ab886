"""Speculative sampling of one token after the other. B sequences, D draft depth, T = D + 1 nodes, V vocabulary."""

from __future__ import annotations

import jax.numpy as jnp

from parallax.decoding import tree
from parallax.decoding.base import policy
from parallax.decoding.verify.judge import Judge, Judgement, residual


@policy
class Rejection(Judge):
    """Keep a drafted token with probability p / q, replace the first that falls by the residual.

    p is the target's law, q the draft's, both after their warpers. Token d is kept if u q(d) < p(d); the first that is
    not is drawn anew from [p - q]+, normalised, and if all are kept one more comes from p. So every token has law p,
    and a token is kept with probability sum min(p, q), the most that any rule can reach for one token. The text
    depends on the draft length as well as on the seed: only its law is that of plain decoding. For chains.
    Source: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318).
    """

    def judge(self, draft, logp, uniform):
        depth = draft.depth
        if not isinstance(draft.parents, tuple) or draft.parents != tree.Shape.chain(depth).parents:
            raise ValueError("rejection sampling verifies chains, this draft is a tree: use Follow")
        drafted = draft.tokens[:, 1:, None]
        ratio = jnp.take_along_axis(logp[:, :-1], drafted, 2) - jnp.take_along_axis(draft.logq, drafted, 2)
        chances = jnp.where(draft.valid[:, 1:], jnp.exp(jnp.minimum(ratio[..., 0], 0)), 0)
        kept = jnp.cumprod(uniform[:, 1:] < chances, 1, dtype=jnp.int32).sum(1)

        def at(values, index):
            return jnp.take_along_axis(values, index.reshape(-1, *(1,) * (values.ndim - 1)), 1)[:, 0]

        # Behind the last kept token there may be no draft, and then nothing was ruled out: q is 0.
        offered = at(jnp.pad(draft.valid[:, 1:], ((0, 0), (0, 1))), kept)
        q = jnp.where(offered[:, None], jnp.exp(at(draft.logq, jnp.minimum(kept, depth - 1))), 0)
        chances = jnp.pad(chances, ((0, 0), (1, 0)))
        return Judgement(kept.astype(jnp.int32), residual(jnp.exp(at(logp, kept)), q), chances)
