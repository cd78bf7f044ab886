"""From logits to tokens: the warpers in one documented order, and noise keyed so that speculation cannot change it.

B sequences, T nodes, V vocabulary.

Order of the warpers (the order of Hugging Face's `generate`): temperature, top-k, top-p, min-p.

Noise that decides target tokens is a function of (sequence key, absolute position) alone. So the token at a position is
the same whether it was reached by plain decoding, along a chain or through a tree, alone or in a batch.

All other noise (of drafts, acceptance and residuals) is private to a step: a function of (sequence key, length at the
start of the step, position, tag). Position alone would not do: a rule that looks beyond the tokens it emits would meet
the noise that it has looked at again in the next step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from parallax.decoding.base import policy, static

DRAFT, ACCEPT, RESIDUAL = range(3)          # tags of private noise
_PRIVATE = 2**31                            # in front of the tags: beyond all positions, which are int32


def row_keys(key: Key[Array, ""], row_ids: Int[Array, "B"]) -> Key[Array, "B"]:
    """One key per sequence. `row_ids` name the requests, so a request keeps its noise in any batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids)


def noise_target(keys: Key[Array, "B"], position: Int[Array, "B"], size: int) -> Float[Array, "B V"]:
    """Gumbel noise that decides the token at `position`."""
    return jax.vmap(lambda key, p: jax.random.gumbel(jax.random.fold_in(key, p), (size,)))(keys, position)


def private_keys(keys: Key[Array, "B"], start: Int[Array, "B"], position: Int[Array, "B"], tag: int) -> Key[Array, "B"]:
    """Keys of noise that is used once, in the step that began at length `start`, for `position` and one purpose."""
    def fold(key, start, position):
        key = jax.random.fold_in(key, np.uint32(_PRIVATE + tag))
        return jax.random.fold_in(jax.random.fold_in(key, start), position)

    return jax.vmap(fold)(keys, start, position)


def noise_private(keys: Key[Array, "B"], start: Int[Array, "B"], position: Int[Array, "B"], tag: int,
                  size: int) -> Float[Array, "B V"]:
    """Gumbel noise of `private_keys`; never that of `noise_target`."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(private_keys(keys, start, position, tag))


def argmax(values: Float[Array, "*lead V"]) -> Int[Array, "*lead"]:
    """`jnp.argmax` over the vocabulary, lowest index of equals, in two steps.

    First the maximum of each stretch of 256, then the place within the best one: XLA's CPU code vectorises a maximum
    but not an argmax (8 rows of 49152 on one core: 0.1 against 0.9 ms).
    """
    size = values.shape[-1]
    stretches = -(-size // 256)
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, stretches * 256 - size)], constant_values=-jnp.inf)
    padded = padded.reshape(*values.shape[:-1], stretches, 256)
    best = jnp.argmax(padded.max(-1), -1)
    within = jnp.argmax(jnp.take_along_axis(padded, best[..., None, None], -2)[..., 0, :], -1)
    return (best * 256 + within).astype(jnp.int32)


class Seen(NamedTuple):
    """The text in front of each of T rows, for warpers that count tokens.

    tokens [B, N], length [B]: what is decided; path [B, T, S], along [B, T, S]: drafts between that and the row, where
    `along` is true.
    """

    tokens: Int[Array, "B N"]
    length: Int[Array, "B"]
    path: Int[Array, "B T S"]
    along: Bool[Array, "B T S"]

    @classmethod
    def text(cls, tokens: Int[Array, "B N"], length: Int[Array, "B"]) -> Seen:
        """Decided text alone, in front of one row."""
        nothing = jnp.zeros((tokens.shape[0], 1, 0), jnp.int32)
        return cls(tokens, length, nothing, nothing.astype(bool))


@policy
class Greedy:
    """The most likely token; of equals, the lowest id."""

    def draw(self, logits: Float[Array, "B T V"], keys: Key[Array, "B"], start: Int[Array, "B"],
             offsets: Int[Array, "T"] | Int[Array, "B T"], depth: int,
             seen: Seen | None = None) -> Int[Array, "B T"]:
        """Tokens after nodes that lie `offsets` (at most `depth`) behind the pending token, which is at `start` - 1.

        seen: the text in front of each of them, itself included.
        """
        return argmax(logits)


@policy
class Sample:
    """Draws from the warped law, by adding Gumbel noise of the token's position and taking the maximum.

    Attributes:
      temperature: divides the logits; positive (0 means `Greedy`, which `make_sampler` picks).
      top_k: keep the k most likely tokens, ties with the k-th included; 0 keeps all. Static.
      top_p: keep the smallest set of most likely tokens with at least this probability; None keeps all.
      min_p: keep tokens with at least this fraction of the largest probability; None keeps all.
    """

    temperature: float = 1.0
    top_k: int = static(default=0)
    top_p: float | None = None
    min_p: float | None = None

    def warp(self, logits: Float[Array, "*lead V"], seen: Seen | None = None) -> Float[Array, "*lead V"]:
        """Log-probabilities up to a constant; dropped tokens are -inf."""
        # From the maximum down, so that a low temperature neither overflows nor rounds the noise away.
        logits = (logits - logits.max(-1, keepdims=True)) / self.temperature
        if self.top_k:
            logits = _keep(logits, jnp.ones_like(logits), self.top_k)
        if self.top_p is not None:
            logits = _keep(logits, jax.nn.softmax(logits, -1), self.top_p)
        if self.min_p is not None:
            floor = logits.max(-1, keepdims=True) + jnp.log(self.min_p)
            logits = jnp.where(logits >= floor, logits, -jnp.inf)
        return logits

    def draw(self, logits, keys, start, offsets, depth, seen=None):
        """As `Greedy.draw`. Noise is drawn once per depth and shared by the nodes of that depth."""
        size = logits.shape[-1]
        noise = jnp.stack([noise_target(keys, start + d, size) for d in range(depth + 1)], 1)
        offsets = jnp.broadcast_to(offsets, logits.shape[:2])
        noise = jnp.take_along_axis(noise, offsets[..., None], 1)
        return argmax(self.warp(logits, seen) + noise)


Sampler = Greedy | Sample


def _keep(logits: Float[Array, "*lead V"], weights: Float[Array, "*lead V"], limit) -> Float[Array, "*lead V"]:
    """Drops every token above which tokens of total weight `limit` or more lie; the best one always stays.

    Finds the lowest logit that is kept by bisection over all float32 values, in 32 sums over the vocabulary: sorting
    8 rows of 49152 takes a CPU 60 to 80 ms, this 4 to 8.
    """
    def to_key(x):                                  # whole numbers in the order of the floats; its own inverse
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return bits ^ jnp.where(bits < 0, 0x7fffffff, 0)

    def halve(_, bounds):
        low, high = bounds                          # too much lies above low, not too much above high
        middle = (low & high) + ((low ^ high) >> 1)
        value = lax.bitcast_convert_type(middle ^ jnp.where(middle < 0, 0x7fffffff, 0), jnp.float32)
        enough = jnp.where(logits > value, weights, 0).sum(-1, keepdims=True) >= limit
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    best = to_key(logits.max(-1, keepdims=True))
    low = jnp.full_like(best, to_key(jnp.float32(-jnp.inf)) - 1)
    lowest = lax.fori_loop(0, 32, halve, (low, best))[1]
    return jnp.where(to_key(logits) >= lowest, logits, -jnp.inf)


def make_sampler(temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
                 min_p: float | None = None) -> Sampler:
    """`Greedy` for temperature 0, which no warper changes, else `Sample`.

    Settings that keep everything are left out of the program.

    Raises:
      ValueError: a setting outside its range.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}")
    if top_k is not None and (top_k < 0 or top_k != int(top_k)):
        raise ValueError(f"top_k must be a whole number of tokens, 0 for all, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {min_p}")
    if temperature == 0:
        if top_k or top_p not in (None, 1) or min_p:
            raise ValueError("top_k, top_p and min_p change nothing at temperature 0 (greedy): set a temperature")
        return Greedy()
    return Sample(temperature=float(temperature), top_k=int(top_k or 0),
                  top_p=None if top_p in (None, 1) else float(top_p), min_p=float(min_p) if min_p else None)
