"""Token recycling: what the target itself thought could follow each token, the last time it saw that token.

B sequences, T tree nodes, V vocabulary, R ranks. Source: Token Recycling (arXiv:2408.08696).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from parallax.decoding.base import Draft, Drafter, policy, static
from parallax.decoding.growth.base import small_enough
from parallax.decoding.tree import Shape

# How often the next token was the one of each rank in the latest row of the current token: 1168 tokens that
# SmolLM2-135M wrote for ten MT-bench prompts. Shapes the tree.
_ACCEPTANCE = (0.31, 0.074, 0.017, 0.015, 0.012, 0.012, 0.005, 0.005)


@policy
class TokenRecycling(Drafter):
    """Keeps the latest top tokens behind every token in a table, and fills a static tree from it.

    Attributes:
      nodes: draft tokens per step. The paper uses about 80, which suits accelerators; on a CPU a block of 8 rows (7
        and the root) costs one and a half steps, one of 16 two.
      max_depth: longest branch.
      ranks: candidates kept per token.
      learn_prompt: also enter what followed each token in the prompt (not in the paper, costs nothing).

    The table starts empty (no draft behind a token that was not seen yet) and each sequence has its own, so results
    do not depend on the batch. If a token stands at several nodes, the row of the last one stays.
    """

    nodes: int = static(default=7)
    max_depth: int = static(default=6)
    ranks: int = static(default=8)
    learn_prompt: bool = static(default=True)

    def __post_init__(self):
        for name in ("nodes", "max_depth", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        small_enough(self.nodes, "the tree")
        if self.ranks > len(_ACCEPTANCE):
            raise ValueError(f"ranks must be at most {len(_ACCEPTANCE)}, got {self.ranks}")

    @functools.cached_property
    def shape(self) -> Shape:
        return Shape.best_first(self.nodes, self.max_depth, _ACCEPTANCE[:self.ranks])

    @property
    def depth(self) -> int:
        return self.shape.depth

    def check(self, target):
        if self.ranks > target.config.vocab_size:
            raise ValueError(f"ranks must be at most the vocabulary's {target.config.vocab_size} tokens, got "
                             f"{self.ranks}")

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
        if step is None:                       # a prefill chunk has no logits, but the prompt tells what follows what
            if not self.learn_prompt:
                return own
            places = advance.start[:, None] + jnp.arange(advance.tokens.shape[1])
            tokens = jnp.take_along_axis(ctx.tokens, jnp.minimum(places, ctx.tokens.shape[1] - 1), 1)
            rows = jnp.pad(advance.tokens[..., None], ((0, 0), (0, 0), (0, self.ranks - 1)), constant_values=-1)
            return _remember(own, tokens, jnp.arange(tokens.shape[1]) < advance.count[:, None], rows)
        best = lax.top_k(step.logits, self.ranks)[1].astype(jnp.int32)                     # [B, T, R]
        valid = step.draft.valid & (advance.count[:, None] > 0)                  # a finished sequence writes nothing
        return _remember(own, step.draft.tokens, valid, best)


def _remember(table: Int[Array, "B V R"], tokens: Int[Array, "B T"], valid: Bool[Array, "B T"],
              rows: Int[Array, "B T R"]) -> Int[Array, "B V R"]:
    """Writes `rows` behind their tokens; of a token that stands there several times, the last valid row."""
    # A scatter leaves open which of several rows stays, so all of them get the last one's values.
    same = tokens[:, :, None] == tokens[:, None, :]
    last = jnp.argmax(jnp.where(same & valid[:, None, :], jnp.arange(tokens.shape[1]), -1), -1)
    rows = jnp.take_along_axis(rows, last[..., None], 1)
    tokens = jnp.where(valid, tokens, table.shape[1])                            # out of range: dropped
    return jax.vmap(lambda table, token, row: table.at[token].set(row, mode="drop"))(table, tokens, rows)
