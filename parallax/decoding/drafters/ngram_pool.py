"""N-gram pool: the last few continuations of the current token, side by side.

B sequences, G branches, M tokens per branch, K committed tokens. Source: the verification branch of Lookahead decoding
(arXiv:2402.02057), with a pool that is fed by prompt and output alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from parallax.decoding import matching, pool
from parallax.decoding.base import Draft, Drafter, policy, static
from parallax.decoding.growth.base import small_enough


@policy
class NgramPool(Drafter):
    """Drafts what followed the pending token the last times that it stood in the text, one branch each.

    Attributes:
      ngram: tokens per n-gram, the key included; a branch has one less.
      branches: n-grams kept and drafted per key; one that comes again is the latest once more. 2 branches of 3 tokens
        and the pending one make 7 rows, of the 8 that cost a CPU little.
      buckets: keys kept per sequence, see `decoding.pool`; the pool takes 4 * buckets * (1 + branches * (ngram - 1))
        bytes per sequence.
    """

    ngram: int = static(default=4)
    branches: int = static(default=2)
    buckets: int = static(default=4096)

    def __post_init__(self):
        for name, low in (("ngram", 2), ("branches", 1), ("buckets", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        small_enough(self.branches * self.depth, "the tree")

    @property
    def depth(self) -> int:
        return self.ngram - 1

    def init(self, params, ctx, prompt, prompt_length):
        return pool.new(prompt.shape[0], self.buckets, self.branches, self.depth)

    def propose(self, params, own, ctx):
        root = matching.pending(ctx)
        grams, there = pool.lookup(own, root[:, 0])
        batch, size = root.shape[0], self.branches * self.depth
        parents = tuple(0 if node % self.depth == 0 else node for node in range(size))      # of node + 1
        valid = jnp.repeat(there, self.depth, 1)
        return Draft(jnp.concatenate([root, grams.reshape(batch, size)], 1), (0, *parents),
                     jnp.concatenate([jnp.ones_like(root, bool), valid], 1), depth=self.depth), own

    def observe(self, params, own, advance, step, ctx):
        end = advance.start[:, None] + 1 + jnp.arange(advance.tokens.shape[1])              # of every new token
        place = end[..., None] - self.depth + jnp.arange(self.ngram)                        # [B, K, n]
        inside = jnp.clip(place, 0, ctx.tokens.shape[1] - 1).reshape(end.shape[0], -1)
        grams = jnp.take_along_axis(ctx.tokens, inside, 1).reshape(place.shape)
        there = (jnp.arange(end.shape[1]) < advance.count[:, None]) & (place[..., 0] >= 0)

        def body(i, own):
            return pool.insert(own, grams[:, i, 0], grams[:, i, 1:], there[:, i])

        return lax.fori_loop(0, advance.count.max(), body, own)
