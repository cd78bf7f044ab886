"""No draft at all: speculative decoding with it *is* plain autoregressive decoding."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp

from parallax.decoding.base import Draft, Drafter, policy


@policy
class Nothing(Drafter):
    """Proposes only the pending token, so each step emits exactly one."""

    depth: ClassVar[int] = 0

    def propose(self, params, own, ctx):
        pending = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)
        return Draft(pending, (0,), jnp.ones_like(pending, bool), depth=0), own
