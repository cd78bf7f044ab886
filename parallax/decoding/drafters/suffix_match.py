"""Suffix matching: what followed the longest end of the text that stands in it, or in a corpus, before.

B sequences, N token slots, C corpus tokens, D draft length. Source: SAM-Decoding (arXiv:2411.10666).
"""

from __future__ import annotations

import pathlib
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from parallax.decoding import matching
from parallax.decoding.base import Drafter, policy, static


class Runs(NamedTuple):
    """text [B, N]: how much of the text's end stands at every place of it; corpus [B, C], the same, or None."""

    text: Int[Array, "B N"]
    corpus: Int[Array, "B C"] | None


@policy
class SuffixMatch(Drafter):
    """Copies from behind the longest match of any length, from the text or from a corpus.

    The result is that of two suffix automata: of equally long matches the one that ends first. The memory per sequence
    is one number per token of the text and of the corpus, and every token written costs one vector operation over them.

    Attributes:
      draft_length: tokens copied, at most.
      min_match: shortest match that makes a draft.
      growth: tokens copied per matched token, rounded down. The paper's 4 shortens only drafts of more than 8 tokens.
      corpus: [C] token ids, a negative one between documents; see `decoding.corpus`. On the command line a path.
      static_bias: the corpus is preferred unless the text's match is longer by more than this.
    """

    draft_length: int = static(default=7)
    min_match: int = static(default=2)
    growth: float = 4.0
    corpus: Any = None
    static_bias: int = 5

    matches: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("draft_length", "min_match"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, low in (("growth", 0.0), ("static_bias", 0)):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not value >= low:
                raise ValueError(f"{name} must be at least {low:g}, got {value}")
        if isinstance(self.corpus, str) and not pathlib.Path(self.corpus).is_file():
            raise ValueError(f"there is no corpus file {self.corpus!r}: give a text or .jsonl file")

    @property
    def depth(self) -> int:
        return self.draft_length

    def check(self, target):
        if self.corpus is None:
            return
        if isinstance(self.corpus, str):
            raise ValueError(f"corpus must be token ids here, got the path {self.corpus!r}: read it with "
                             "parallax.decoding.corpus.load_corpus")
        ids, size = np.asarray(self.corpus), target.config.vocab_size
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"corpus must be a list of token ids, got {ids.dtype} {list(ids.shape)}")
        if ids.max() >= size:
            raise ValueError(f"corpus holds token {ids.max()}, the model's vocabulary is 0 to {size - 1}: read it with "
                             "the model's tokenizer")

    def init(self, params, ctx, prompt, prompt_length):
        text, corpus = jnp.zeros(ctx.tokens.shape, jnp.int32), None
        if self.corpus is not None:                          # commits tell only of the tokens behind the first one
            empty = jnp.zeros((prompt.shape[0], self._ids.shape[1]), jnp.int32)
            corpus = matching.grow(empty, self._ids, prompt[:, 0])
        return Runs(text, corpus)

    def propose(self, params, own, ctx):
        run = jnp.where(matching.earlier(ctx.tokens, ctx.length), own.text, 0)
        match = run.max(1)
        tokens, there = matching.behind(ctx.tokens, jnp.argmax(run, 1), ctx.length, self.draft_length)
        if self.corpus is not None:
            known = own.corpus.max(1)
            copied, present = matching.behind(self._ids, jnp.argmax(own.corpus, 1), self._ids.shape[1],
                                              self.draft_length)
            take = (known >= self.min_match) & ~(match > known + self.static_bias)
            match = jnp.where(take, known, match)
            tokens, there = (jnp.where(take[:, None], *pair) for pair in ((copied, tokens), (present, there)))
        wanted = jnp.where(match >= self.min_match, jnp.floor(self.growth * match), 0)
        return matching.chain(ctx, tokens, there & (jnp.arange(self.draft_length) < wanted[:, None]), match), own

    def observe(self, params, own, advance, step, ctx):
        text = matching.append(own.text, ctx.tokens, advance.tokens, advance.count)
        if self.corpus is None:
            return Runs(text, None)
        return Runs(text, matching.append(own.corpus, self._ids, advance.tokens, advance.count))

    def rewind(self, params, own, ctx):
        text = matching.compare(ctx.tokens, matching.earlier(ctx.tokens, ctx.length), ctx.tokens, ctx.length)
        if self.corpus is None:
            return Runs(text, None)
        return Runs(text, matching.compare(self._ids, self._ids >= 0, ctx.tokens, ctx.length))

    @property
    def _ids(self) -> Int[Array, "1 C"]:
        return jnp.asarray(self.corpus, jnp.int32)[None]
