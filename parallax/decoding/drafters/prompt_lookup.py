"""Prompt lookup: what followed the last few tokens when they stood in the text before.

B sequences, N token slots. Source: Prompt Lookup Decoding (A. Saxena, 2023); LLMA (arXiv:2304.04487).
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from parallax.decoding.base import Draft, Drafter, policy, static
from parallax.decoding.tree import Shape


@policy
class PromptLookup(Drafter):
    """Copies the tokens behind the longest earlier match of the current suffix.

    Attributes:
      max_ngram: longest suffix that is matched; longer matches win.
      min_ngram: shortest match that makes a draft. A single token matches nearly anywhere in free text, and a wrong
        draft costs half a step more than none.
      draft_length: tokens copied, fewer where the match is near the end of the text. 7 and the pending token fill a
        block of 8 rows, the most that costs a CPU little (see `models.layers.fill`).
      prefer: of equally long matches, the `last` or the `first` one in the text.
    """

    max_ngram: int = static(default=4)
    min_ngram: int = static(default=2)
    draft_length: int = static(default=7)
    prefer: Literal["last", "first"] = static(default="last")

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"expected 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be at least 1, got {self.draft_length}")
        if self.prefer not in ("last", "first"):
            raise ValueError(f"prefer must be 'last' or 'first', got {self.prefer!r}")

    @property
    def depth(self) -> int:
        return self.draft_length

    def propose(self, params, own, ctx):
        tokens, length = ctx.tokens, ctx.length
        end = self.find(tokens, length)                                                    # [B], -1 without a match
        source = end[:, None] + 1 + jnp.arange(self.draft_length)
        copied = jnp.take_along_axis(tokens, jnp.clip(source, 0, tokens.shape[1] - 1), 1)
        pending = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
        valid = (end[:, None] >= 0) & (source < length[:, None])
        return Draft(jnp.concatenate([pending, copied], 1), Shape.chain(self.draft_length).parents,
                     jnp.concatenate([jnp.ones_like(pending, bool), valid], 1), depth=self.draft_length), own

    def find(self, tokens: Int[Array, "B N"], length: Int[Array, "B"]) -> Int[Array, "B"]:
        """Index of the last token of the best earlier match of the suffix, -1 if there is none.

        The suffix never matches itself: a match ends before the last token.
        """
        index = jnp.arange(tokens.shape[1])
        running = jnp.broadcast_to(index < length[:, None] - 1, tokens.shape)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.max_ngram):
            wanted = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], 1)
            here = jnp.roll(tokens, back, 1)                                               # here[i] = tokens[i - back]
            running = running & (here == wanted) & (index >= back)
            matched = matched + running
        order = index if self.prefer == "last" else tokens.shape[1] - 1 - index
        score = jnp.where(matched >= self.min_ngram, matched * tokens.shape[1] + order, -1)
        return jnp.where(score.max(1) >= 0, jnp.argmax(score, 1), -1).astype(jnp.int32)
