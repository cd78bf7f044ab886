"""From logits to tokens: samplers with their settings, and noise keyed so that speculation cannot change it.

B sequences, T nodes, V vocabulary. The warpers and their order: `parallax.decoding.warpers`.

Noise that decides target tokens is a function of (sequence key, absolute position) alone. So the token at a position is
the same whether it was reached by plain decoding, along a chain or through a tree, alone or in a batch.

All other noise (of drafts, acceptance and residuals) is private to a step: a function of (sequence key, length at the
start of the step, position, tag). Position alone would not do: a rule that looks beyond the tokens it emits would meet
the noise that it has looked at again in the next step.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from parallax.decoding import warpers
from parallax.decoding.base import policy
from parallax.decoding.warpers import Bias, Penalties, Seen
from parallax.kernels import vocabulary
from parallax.kernels.dispatch import Kernels

DRAFT, ACCEPT, RESIDUAL, DROPOUT = range(4)          # tags of private noise
_PRIVATE = 2**31                            # in front of the tags: beyond all positions, which are int32


def row_keys(key: Key[Array, ""], row_ids: Int[Array, "B"]) -> Key[Array, "B"]:
    """One key per sequence. `row_ids` name the requests, so a request keeps its noise in any batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids)


def noise_target(keys: Key[Array, "B"], position: Int[Array, "B"], size: int) -> Float[Array, "B V"]:
    """Gumbel noise that decides the token at `position`."""
    return jax.vmap(lambda key, p: jax.random.gumbel(jax.random.fold_in(key, p), (size,)))(keys, position)


def target_keys(keys: Key[Array, "B"], position: Int[Array, "B D"]) -> Key[Array, "B D"]:
    """Keys of `noise_target` at several positions of each sequence."""
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, position)


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


@policy
class Greedy(Penalties):
    """The most likely token after bias and penalties (`Penalties`); of equals, the lowest id."""

    def warp(self, logits: Float[Array, "B T V"], seen: Seen | None = None) -> Float[Array, "B T V"]:
        """The law of the token: 0 at the one that is taken, -inf elsewhere."""
        return _certain(self.penalise(logits, seen))

    def draw(self, logits: Float[Array, "B T V"], keys: Key[Array, "B"], start: Int[Array, "B"],
             offsets: Int[Array, "T"] | Int[Array, "B T"], depth: int, seen: Seen | None = None,
             kernels: Kernels = "xla") -> Int[Array, "B T"]:
        """Tokens after nodes that lie `offsets` (at most `depth`) behind the pending token, which is at `start` - 1.

        seen: the text in front of each of them, itself included. kernels: which version runs, see
        `parallax.kernels.dispatch`; the tokens are the same.
        """
        logits = self.penalise(logits, seen)
        if vocabulary.in_use(kernels):
            return vocabulary.statistics(logits, ("best",), kernels=kernels).best
        return argmax(logits)


@policy
class Sample(Penalties):
    """Draws from the warped law, by adding Gumbel noise of the token's position and taking the maximum.

    Every setting is one number, or one per sequence as an array [B]; None leaves it out of the program. See
    `parallax.decoding.warpers` for what they keep.

    Attributes:
      temperature: divides the logits. A single number is positive (0 is `Greedy`, which `make_sampler` picks); in an
        array, 0 makes that sequence greedy.
      top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff: which tokens stay.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None

    def warp(self, logits: Float[Array, "*lead V"], seen: Seen | None = None) -> Float[Array, "*lead V"]:
        """Log-probabilities up to a constant; dropped tokens are -inf."""
        penalised = self.penalise(logits, seen)
        # From the maximum down, so that a low temperature neither overflows nor rounds the noise away.
        logits = penalised - penalised.max(-1, keepdims=True)
        temperature = warpers.by_row(self.temperature, logits)
        mixed = jnp.ndim(self.temperature) > 0
        logits = logits / (jnp.where(temperature == 0, 1, temperature) if mixed else temperature)
        for name in _TRUNCATING:
            value = getattr(self, name)
            logits = logits if value is None else getattr(warpers, name)(logits, value)
        return jnp.where(temperature == 0, _certain(penalised), logits) if mixed else logits

    def untempered(self, logits: Float[Array, "*lead V"], seen: Seen | None = None):
        """(logits, temperature): divided by the temperature, the logits are those of `warp` up to a constant.

        So a kernel need not read what another pass has written, if there is nothing to do but to divide: else the
        temperature is None and all is done.
        """
        if jnp.ndim(self.temperature) or any(getattr(self, name) is not None for name in _TRUNCATING):
            return self.warp(logits, seen), None
        return self.penalise(logits, seen), self.temperature

    def draw(self, logits, keys, start, offsets, depth, seen=None, kernels="xla"):
        """As `Greedy.draw`. Noise is drawn once per depth and shared by the nodes of that depth."""
        if vocabulary.in_use(kernels):
            logits, temperature = self.untempered(logits, seen)
            noise = vocabulary.Noise(target_keys(keys, start[:, None] + jnp.arange(depth + 1)), offsets)
            return vocabulary.statistics(logits, temperature=temperature, noise=noise, kernels=kernels).drawn
        size = logits.shape[-1]
        noise = jnp.stack([noise_target(keys, start + d, size) for d in range(depth + 1)], 1)
        offsets = jnp.broadcast_to(offsets, logits.shape[:2])
        noise = jnp.take_along_axis(noise, offsets[..., None], 1)
        return argmax(self.warp(logits, seen) + noise)


Sampler = Greedy | Sample

_TRUNCATING = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")         # in this order


def _certain(logits):
    taken = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    return jnp.where(taken, jnp.zeros_like(logits), -jnp.inf)


def make_sampler(temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
                 min_p: float | None = None, *, typical_p: float | None = None, epsilon_cutoff: float | None = None,
                 eta_cutoff: float | None = None, repetition_penalty: float | None = None,
                 presence_penalty: float | None = None, frequency_penalty: float | None = None,
                 logit_bias: Mapping[int, float] | str | None = None) -> Sampler:
    """`Greedy` for temperature 0, else `Sample`; settings that change nothing are left out of the program.

    Args:
      temperature, ..., frequency_penalty: a number, or a list of one per sequence; None changes nothing.
      logit_bias: {token id: what to add to its logit}, or that as JSON, or a list of one such per sequence.

    Raises:
      ValueError: a setting outside its range, or one that changes nothing because all is greedy.
    """
    given = {name: value for name, value in locals().items() if name not in ("temperature", "logit_bias")}
    settings = {name: _setting(name, value) for name, value in given.items()}
    temperature = _setting("temperature", 0.0 if temperature is None else temperature)
    penalties = {"logit_bias": _bias(logit_bias),
                 **{name: settings.pop(name) for name in list(settings) if name not in _TRUNCATING}}
    if temperature is not None:
        return Sample(temperature=temperature, **settings, **penalties)
    if any(value is not None for value in settings.values()):
        raise ValueError(f"{', '.join(_TRUNCATING[:-1])} and {_TRUNCATING[-1]} change nothing at temperature 0 "
                         "(greedy): set a temperature")
    return Greedy(**penalties)


SAMPLING = tuple(inspect.signature(make_sampler).parameters)         # the names of all settings


def active(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings of `make_sampler`, without the temperature, that change something."""
    neutral = {name: allowed.neutral for name, allowed in _RANGES.items()}
    return {name: settings[name] for name in SAMPLING[1:]
            if settings.get(name) is not None and settings[name] not in (neutral.get(name), "", {})}


def sequences(sampler: Sampler) -> set[int]:
    """For how many sequences the settings are that have one value per sequence."""
    return {len(leaf) for leaf in jax.tree.leaves(sampler) if np.ndim(leaf) == 1} | (
        {len(sampler.logit_bias.tokens)} - {1} if sampler.logit_bias is not None else set())


def of_rows(sampler: Sampler, first: int, last: int) -> Sampler:
    """The sampler of sequences first to last - 1."""
    return jax.tree.map(lambda leaf: leaf[first:last] if np.ndim(leaf) and len(leaf) > 1 else leaf, sampler)


class _Range(NamedTuple):
    """What a setting may be: a test, in words, and the value that changes nothing."""

    holds: Callable[[Any], bool]
    words: str
    neutral: float


_SHARE = _Range(lambda x: 0 < x <= 1, "in (0, 1]", 1)
_CUTOFF = _Range(lambda x: 0 <= x < 1, "in [0, 1)", 0)
_PENALTY = _Range(lambda x: -2 <= x <= 2, "in [-2, 2]", 0)
_RANGES = {
    # Beyond these float32, in which the loop computes, knows only 0 and infinity.
    "temperature": _Range(lambda x: x == 0 or 1e-30 <= x <= 1e30, "0 (greedy) or from 1e-30 to 1e30", 0),
    "top_k": _Range(lambda x: 0 <= x < 2**31 and x == int(x), "a whole number of tokens, 0 for all", 0),
    "top_p": _SHARE, "min_p": _Range(lambda x: 0 <= x <= 1, "in [0, 1]", 0), "typical_p": _SHARE,
    "epsilon_cutoff": _CUTOFF, "eta_cutoff": _CUTOFF,
    "repetition_penalty": _Range(lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6, 1 for none", 1),
    "presence_penalty": _PENALTY, "frequency_penalty": _PENALTY,
}


def _setting(name: str, value: Any) -> Any:
    """The checked value as a number or an array [B]; None if it changes nothing."""
    if value is None:
        return None
    allowed = _RANGES[name]
    try:
        values = np.asarray(value, float)
    except (TypeError, ValueError):
        values = None
    if values is None or values.ndim > 1 or not values.size:
        raise ValueError(f"{name} must be a number, or a list of one per sequence, got {value!r:.60}")
    for i, single in enumerate(values.ravel().tolist()):
        if not allowed.holds(single):
            got = f"{single:g} for sequence {i}" if values.ndim else value
            raise ValueError(f"{name} must be {allowed.words}, got {got}")
    if (values == allowed.neutral).all():
        return None
    if not values.ndim:
        return int(values) if name == "top_k" else float(values)
    return values.astype(np.int32 if name == "top_k" else np.float32)


def _bias(value: Any) -> Bias | None:
    """The checked biases, filled up with zeros to one width; None if there are none."""
    if value is None:
        return None
    rows = [_pairs(entry) for entry in (value if isinstance(value, (list, tuple)) else [value])]
    width = max(map(len, rows), default=0)
    if not width:
        return None
    rows = [row + [(0, 0.0)] * (width - len(row)) for row in rows]
    tokens, values = zip(*(zip(*row) for row in rows))
    return Bias(np.asarray(tokens, np.int32), np.asarray(values, np.float32))


def _pairs(entry: Any) -> list[tuple[int, float]]:
    form = "logit_bias must be {token id: number}"
    try:
        entry = json.loads(entry or "{}") if isinstance(entry, str) else entry or {}
        pairs = [(int(str(token)), float(bias)) for token, bias in entry.items()]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{form}, as in {{\"50256\": -100}}, got {entry!r:.60}") from None
    for token, bias in pairs:
        if not 0 <= token < 2**31 or not abs(bias) <= 1e30:
            raise ValueError(f"{form} with ids from 0 and numbers from -1e30 to 1e30, got {token}: {bias:g}")
    return pairs
