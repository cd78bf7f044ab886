"""Prompt lookup: what followed the last few tokens when they stood in the text before.

B sequences, N token slots. Source: Prompt Lookup Decoding (A. Saxena, 2023); LLMA (arXiv:2304.04487).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from parallax.decoding import matching
from parallax.decoding.base import Drafter, policy, static


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

    matches: ClassVar[bool] = True

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
        end, match = self.find(ctx.tokens, ctx.length)
        tokens, there = matching.behind(ctx.tokens, end, ctx.length, self.draft_length)
        return matching.chain(ctx, tokens, there & (match > 0)[:, None], match), own

    def find(self, tokens: Int[Array, "B N"], length: Int[Array, "B"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """(index of the last token of the best earlier match of the suffix, its length), (-1, 0) if there is none."""
        run = matching.compare(tokens, matching.earlier(tokens, length), tokens, length, longest=self.max_ngram)
        match = run.max(1)
        found = match >= self.min_ngram
        best = run == match[:, None]
        last = tokens.shape[1] - 1 - jnp.argmax(best[:, ::-1], 1)
        end = last if self.prefer == "last" else jnp.argmax(best, 1)
        return jnp.where(found, end, -1).astype(jnp.int32), jnp.where(found, match, 0)
