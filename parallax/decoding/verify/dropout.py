"""DropMatch: acceptance by heads that dropout makes differ. B sequences, T nodes, E hidden size, V vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from parallax.decoding import tree
from parallax.decoding.base import policy, static
from parallax.decoding.sampling import DROPOUT, private_keys
from parallax.decoding.verify.relaxed import Relaxed, behind, checked


@policy
class Dropout(Relaxed):
    """Good enough is a token that one of `heads` stochastic heads takes, or a share `agreement` of them.

    A head drops each number of the last hidden state with probability `rate` in front of the final norm and the
    unembedding, and takes its token as the sampler does, with the noise of the position. So at rate 0 all heads are the
    target, and this is sample-and-follow. The noise of a head does not depend on how many there are, so with more
    heads, at agreement 0, no token falls that passed with fewer. Costs `heads` more unembeddings of every node.
    Source: DropMatch, of which the abstract was available: the defaults are ours.
    """

    heads: int = static(default=4)
    rate: float = 0.1
    agreement: float = 0.0

    def __post_init__(self):
        checked("heads", self.heads, 1, 8, "from 1 to 8")
        checked("agreement", self.agreement, 0, 1, "in [0, 1]")
        checked("rate", self.rate, 0, 0.999, "in [0, 0.999]")

    def accepts(self, draft, logits, targets, hidden, ctx):
        size, width = hidden.shape[1:]
        offsets, seen = tree.depths(draft.parents, draft.depth), tree.seen(draft, ctx)
        keys = jnp.stack([private_keys(ctx.key, ctx.length, jnp.full_like(ctx.length, n), DROPOUT)
                          for n in range(size)], 1)

        def votes(head):
            noise = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, head), (width,))))(keys)
            thinned = jnp.where(noise >= self.rate, hidden / (1 - self.rate), 0).astype(hidden.dtype)
            logits = ctx.model.unembed(ctx.params, thinned)
            taken = self.sampler.draw(logits, ctx.key, ctx.length, offsets, draft.depth, seen)
            return draft.tokens == behind(draft, taken)

        agreed = lax.map(votes, jnp.arange(self.heads)).sum(0)
        return (agreed > 0) & (agreed >= self.agreement * self.heads)
