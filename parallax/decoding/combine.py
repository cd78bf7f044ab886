"""Two drafts, one of them per sequence. B sequences, T tree nodes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool

from parallax.decoding.base import Draft


def choose(flag: Bool[Array, "B"], first: Draft, second: Draft) -> Draft:
    """`first` in the sequences with the flag, `second` in the others; costs add up, for both were drafted.

    Raises:
      ValueError: at trace time, if one of them is drawn, as the law of the result would be neither's.
    """
    for draft in (first, second):
        if draft.kind != "deterministic":
            raise ValueError(f"only deterministic drafts can be chosen from, got a {draft.kind} one")
    batch, size = first.tokens.shape[0], max(first.tokens.shape[1], second.tokens.shape[1])

    def pick(a, b):
        return jnp.where(flag.reshape(batch, *[1] * (jnp.ndim(a) - 1)), a, b)

    def padded(values):
        values = jnp.asarray(values)
        values = jnp.broadcast_to(values, (batch, values.shape[-1]))
        return jnp.pad(values, ((0, 0), (0, size - values.shape[1])))                  # an invalid child of the root

    nothing = jnp.zeros((batch,), jnp.int32)
    matches = [nothing if draft.match is None else draft.match for draft in (first, second)]
    return Draft(pick(padded(first.tokens), padded(second.tokens)), pick(padded(first.parents), padded(second.parents)),
                 pick(padded(first.valid), padded(second.valid)), depth=max(first.depth, second.depth),
                 match=pick(*matches), forwards=first.forwards + second.forwards, rows=first.rows + second.rows)
