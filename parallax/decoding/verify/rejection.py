"""Speculative sampling, one token after the other. B sequences, T nodes, V vocabulary."""

from __future__ import annotations

import jax.numpy as jnp

from parallax.decoding import tree
from parallax.decoding.base import policy
from parallax.decoding.sampling import RESIDUAL, private_keys
from parallax.decoding.verify.judge import (
    Judge,
    Judgement,
    descend,
    drawn,
    log_residual,
    normalised,
    numbers,
    parents_of,
    row,
    static_parents,
    without,
)
from parallax.kernels import vocabulary


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

    The kernels verify chains: one pass over all rows, one over the row that decides, and no law is written to memory.
    Trees are left to XLA, for every fallen sibling changes the whole law that the next one is judged by.
    """

    def __call__(self, draft, logits, hidden, ctx):
        kernels, chain = ctx.kernels, tree.Shape.chain(draft.tokens.shape[1] - 1).parents
        # A subclass judges otherwise.
        if type(self) is not Rejection or static_parents(draft) != chain or not vocabulary.in_use(kernels):
            return super().__call__(draft, logits, hidden, ctx)
        logits, temperature = self.sampler.untempered(logits, tree.seen(draft, ctx))
        laws = vocabulary.statistics(logits, ("lse",), temperature=temperature, kernels=kernels)
        batch, parents = jnp.arange(len(logits))[:, None], parents_of(draft)
        z = logits[batch, parents, draft.tokens] - laws.top[batch, parents]
        logp = (z if temperature is None else z / temperature) - laws.lse[batch, parents]
        logq = draft.logq[batch, jnp.minimum(parents, draft.logq.shape[1] - 1), draft.tokens]
        there = drawn(draft)
        kept = there & (numbers(draft, ctx) < jnp.exp(jnp.minimum(logp - logq, 0)))
        node = jnp.cumprod(kept[:, 1:].astype(jnp.int32), 1).sum(1)
        fell = jnp.pad(there[:, 1:], ((0, 0), (0, 1)))[batch[:, 0], node]
        keys = private_keys(ctx.key, ctx.length, ctx.length, RESIDUAL)
        following = vocabulary.residual(logits, laws.top, laws.lse, draft.logq, node, fell, keys,
                                        temperature=temperature, kernels=kernels)
        return tree.verdict(draft, node, following)

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
