"""Adaptive n-grams: the most frequent continuation of the longest context that the text has seen.

B sequences, N token slots, D draft length. Source: ANPD, adaptive n-gram parallel decoding (arXiv:2404.08698).
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from parallax.decoding import matching
from parallax.decoding.base import Drafter, policy, static


@policy
class AdaptiveNgram(Drafter):
    """Grows a draft token by token from n-gram counts of the text so far.

    For every draft token the context is the end of the text and of the draft so far. The longest context of at most
    `max_ngram` tokens that stands earlier in the text decides: of the tokens behind its places the most frequent one is
    taken, among equally frequent ones the latest. So one draft may follow several places, where prompt lookup copies
    one. The counts are those of the text at hand, recounted where they are needed: nothing is stored.

    Attributes:
      max_ngram: longest context.
      min_ngram: shortest; where it was never seen, the draft ends.
      draft_length: tokens per draft, at most.
    """

    max_ngram: int = static(default=5)
    min_ngram: int = static(default=2)
    draft_length: int = static(default=7)

    matches: ClassVar[bool] = True

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"expected 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be at least 1, got {self.draft_length}")

    @property
    def depth(self) -> int:
        return self.draft_length

    def propose(self, params, own, ctx):
        tokens, vocabulary = ctx.tokens, ctx.model.config.vocab_size
        places = matching.earlier(tokens, ctx.length)
        following = jnp.roll(tokens, -1, 1)                             # only read at `places`, which have a next one

        def step(carry, _):
            run, alive = carry
            level = run.max(1)
            alive = alive & (level >= self.min_ngram)
            candidates = (run == level[:, None]) & alive[:, None]
            counts = jax.vmap(lambda token, here: jnp.zeros(vocabulary, jnp.int32).at[token].add(here)[token])(
                following, candidates.astype(jnp.int32))
            counts = jnp.where(candidates, counts, -1)
            best = counts == counts.max(1, keepdims=True)
            latest = tokens.shape[1] - 1 - jnp.argmax(best[:, ::-1], 1)
            token = jnp.take_along_axis(following, latest[:, None], 1)[:, 0]
            grown = jnp.minimum(matching.grow(run, tokens, token), self.max_ngram)
            return (jnp.where(places, grown, 0), alive), (token, alive)

        run = matching.compare(tokens, places, tokens, ctx.length, longest=self.max_ngram)
        carry = (run, jnp.ones_like(ctx.length, bool))
        _, (drafted, alive) = lax.scan(step, carry, length=self.draft_length)
        return matching.chain(ctx, jnp.where(alive, drafted, 0).T, alive.T, run.max(1)), own
