"""Input-guided decoding: the draft is the prompt, from where the output was last found in it.

B sequences, P prompt slots, N token slots. Source: input-guided aggressive decoding (arXiv:2106.04970).
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from parallax.decoding import matching
from parallax.decoding.base import Drafter, policy, static


class Source(NamedTuple):
    """run [B, P]: how much of the output ends at every place of the prompt; length [B] of the prompt."""

    run: Int[Array, "B P"]
    length: Int[Array, "B"]


@policy
class InputGuided(Drafter):
    """For rewriting: copies the prompt on from the one place where the end of the output stands in it.

    The longest end of the output that occurs in the prompt must occur there once. While the output agrees with the
    prompt that place moves along and stays the only longest match, so this is the pointer of the paper; after a
    mismatch there is no draft until the output is found again. The output itself is never searched, and an empty output
    has no draft: a prompt does not say where the text to rewrite begins.

    Attributes:
      draft_length: tokens copied, fewer near the end of the prompt.
      min_match: shortest end of the output that is looked for.
    """

    draft_length: int = static(default=7)
    min_match: int = static(default=1)

    matches: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("draft_length", "min_match"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def depth(self) -> int:
        return self.draft_length

    def init(self, params, ctx, prompt, prompt_length):
        return Source(jnp.zeros(prompt.shape, jnp.int32), prompt_length)

    def propose(self, params, own, ctx):
        match = own.run.max(1)
        best = own.run == match[:, None]
        found = (match >= self.min_match) & (best.sum(1) == 1)
        tokens, there = matching.behind(self._prompt(own, ctx), jnp.argmax(best, 1), own.length, self.draft_length)
        return matching.chain(ctx, tokens, there & found[:, None], match), own

    def observe(self, params, own, advance, step, ctx):
        if step is None:                                                # the prompt is no output
            return own
        return own._replace(run=matching.append(own.run, self._prompt(own, ctx), advance.tokens, advance.count))

    def rewind(self, params, own, ctx):
        source = self._prompt(own, ctx)
        return own._replace(run=matching.compare(source, source >= 0, ctx.tokens, ctx.length, since=own.length))

    @staticmethod
    def _prompt(own, ctx) -> Int[Array, "B P"]:
        """The prompt, -1 behind its end."""
        size = own.run.shape[1]
        return jnp.where(jnp.arange(size) < own.length[:, None], ctx.tokens[:, :size], -1)
