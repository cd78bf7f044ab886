"""Token recycling: what the target itself thought could follow each token, the last time it saw that token.

B sequences, T tree nodes, V vocabulary, R ranks. Source: Token Recycling (arXiv:2408.08696).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from parallax.decoding.base import Draft, policy, static
from parallax.decoding.tree import Shape

# How often the target's next token was the child of each rank, on chat prompts with SmolLM2-135M; shapes the tree.
_ACCEPTANCE = (0.36, 0.14, 0.07, 0.05, 0.03, 0.03, 0.02, 0.02)


@policy
class TokenRecycling:
    """Keeps the latest top tokens behind every token in a table, and fills a static tree from it.

    Attributes:
      nodes: draft tokens per step. The paper uses about 80, which suits accelerators; on a CPU, where a row costs
        about a tenth of a step, 8 to 16 pay.
      max_depth: longest branch.
      ranks: candidates kept per token.

    The table starts empty (no draft behind a token that was not seen yet) and each sequence has its own, so results
    do not depend on the batch. If a token stands at several nodes, the row of the last one stays.
    """

    nodes: int = static(default=12)
    max_depth: int = static(default=6)
    ranks: int = static(default=8)

    def __post_init__(self):
        for name in ("nodes", "max_depth", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ranks > len(_ACCEPTANCE):
            raise ValueError(f"ranks must be at most {len(_ACCEPTANCE)}, got {self.ranks}")

    @functools.cached_property
    def shape(self) -> Shape:
        return Shape.best_first(self.nodes, self.max_depth, _ACCEPTANCE[:self.ranks])

    @property
    def depth(self) -> int:
        return self.shape.depth

    def init(self, params, ctx, prompt, prompt_length):
        return jnp.full((prompt.shape[0], ctx.model.config.vocab_size, self.ranks), -1, jnp.int32)

    def propose(self, params, own, ctx):
        pending = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)[:, 0]
        tokens, valid = [pending], [jnp.ones_like(pending, bool)]
        for parent, rank in zip(self.shape.parents[1:], self.shape.ranks[1:]):
            child = jax.vmap(lambda table, token: table[token, rank])(own, tokens[parent])
            tokens.append(jnp.maximum(child, 0))
            valid.append(valid[parent] & (child >= 0))
        return Draft(jnp.stack(tokens, 1), self.shape.parents, jnp.stack(valid, 1), depth=self.depth), own

    def observe(self, params, own, advance, step, ctx):
        if step is None:                                 # prefill computes no logits
            return own
        best = lax.top_k(step.logits, self.ranks)[1].astype(jnp.int32)                     # [B, T, R]
        tokens, valid = step.draft.tokens, step.draft.valid
        # A scatter leaves open which of several rows for one token stays: give all of them the last one's values, and
        # send invalid nodes to the root, which is always valid.
        tokens = jnp.where(valid, tokens, tokens[:, :1])
        same = tokens[:, :, None] == tokens[:, None, :]
        last = jnp.argmax(jnp.where(same & valid[:, None, :], jnp.arange(tokens.shape[1]), -1), -1)
        best = jnp.take_along_axis(best, last[..., None], 1)
        tokens = jnp.where(advance.count[:, None] > 0, tokens, own.shape[1])       # a finished one writes nothing
        return jax.vmap(lambda table, token, row: table.at[token].set(row, mode="drop"))(own, tokens, best)
