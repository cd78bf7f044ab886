"""The one loop. B sequences, P prompt slots, N token slots.

`decode` compiles prefill and all steps into one program. `stream` drives the same step from the host, a few steps at a
time, for text as it comes. Neither knows what a method does: they read `done` and add up `StepInfo`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from parallax.decoding.base import Decoder, DecodeState, Params, Result, StepInfo
from parallax.decoding.sampling import row_keys


class Inputs(NamedTuple):
    """Everything traced, in one fixed form: see `cast`."""

    decoder: Decoder
    params: Params
    prompt: jax.Array
    prompt_length: jax.Array
    row_ids: jax.Array
    key: jax.Array
    limit: jax.Array


def decode(decoder: Decoder, params: Params, prompt, prompt_length, row_ids, key, limit, *, capacity: int) -> Result:
    """Decodes a batch of prompts to the end, in one compiled program.

    Args:
      decoder: the method.
      params: {"target": ..., "draft": ... if the drafter has parameters}.
      prompt: [B, P] token ids, anything behind each prompt's length.
      prompt_length: [B], at least 1.
      row_ids: [B] or None: names of the requests, for noise that does not depend on the batch; None numbers them.
      key: a `jax.random.key`, or an int seed. Not consumed: equal keys give equal tokens.
      limit: [B] or int, longest allowed length, prompt included.
      capacity: token slots N per sequence, static; at least every limit and P.

    Returns:
      tokens, lengths and summed counters.

    Raises:
      ValueError: before compiling, if the arguments do not fit each other.
      FloatingPointError: the model gave logits that are not numbers.
    """
    inputs = cast(decoder, params, prompt, prompt_length, row_ids, key, limit, capacity=capacity)
    result = run(inputs, capacity)
    check_finite(result.info)
    return result


def stream(decoder: Decoder, params: Params, prompt, prompt_length, row_ids, key, limit, *, capacity: int,
           steps: int = 1, stop: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None) -> Iterator[Result]:
    """As `decode`, but yields the state of things every `steps` steps; `stop(tokens, length) -> [B] bool` ends rows."""
    inputs = cast(decoder, params, prompt, prompt_length, row_ids, key, limit, capacity=capacity)
    state = prefill(inputs, capacity)
    total = None
    while not np.asarray(state.done).all():
        state, info = advance(inputs.decoder, inputs.params, state, jnp.int32(steps))
        check_finite(info)
        info = jax.tree.map(np.asarray, info)
        total = info if total is None else jax.tree.map(np.add, total, info)
        result = Result(np.asarray(state.tokens), np.asarray(state.length), np.asarray(inputs.prompt_length), total)
        if stop is not None:
            state = state._replace(done=state.done | jnp.asarray(stop(result.tokens, result.length)))
        yield result


@functools.partial(jax.jit, static_argnames="capacity")
def prefill(inputs: Inputs, capacity: int) -> DecodeState:
    """The state in front of the first step."""
    keys = row_keys(inputs.key, inputs.row_ids)
    return inputs.decoder.init(inputs.params, inputs.prompt, inputs.prompt_length, keys, inputs.limit, capacity)


@functools.partial(jax.jit, donate_argnames="state")
def advance(decoder: Decoder, params: Params, state: DecodeState, steps) -> tuple[DecodeState, StepInfo]:
    """At most `steps` steps, fewer if all sequences are done. The state is donated."""
    return _loop(decoder, params, state, steps)


@functools.partial(jax.jit, static_argnames="capacity")
def run(inputs: Inputs, capacity: int) -> Result:
    """Prefill and all steps, for arguments that went through `cast`."""
    state, info = _loop(inputs.decoder, inputs.params, prefill(inputs, capacity), jnp.iinfo(jnp.int32).max)
    return Result(state.tokens, state.length, inputs.prompt_length, info)


def _loop(decoder, params, state, steps):
    zero = StepInfo.zeros(state.length.shape[0], decoder.depth)

    def cond(carry):
        i, state, _ = carry
        return (i < steps) & ~state.done.all()

    def body(carry):
        i, state, total = carry
        state, info = decoder.step(params, state)
        return i + 1, state, jax.tree.map(jnp.add, total, info)

    _, state, total = lax.while_loop(cond, body, (jnp.int32(0), state, zero))
    return state, total


def cast(decoder: Decoder, params: Params, prompt, prompt_length, row_ids, key, limit, *, capacity: int) -> Inputs:
    """Checks the arguments and gives each one type, so that nothing recompiles by accident.

    A Python float is a weakly typed leaf, a numpy array an uncommitted one, None another structure: each would be one
    more compiled program for the same work.
    """
    decoder.check()
    prompt = np.asarray(prompt)
    if prompt.ndim != 2 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"prompt must be whole numbers [batch, slots], got {prompt.dtype} {list(prompt.shape)}")
    batch, width = prompt.shape
    lengths = np.broadcast_to(np.asarray(prompt_length), (batch,))
    limits = np.broadcast_to(np.asarray(limit), (batch,))
    if lengths.min(initial=1) < 1:
        raise ValueError(f"prompt {int(lengths.argmin())} is empty: decoding starts from at least one token")
    if lengths.max(initial=0) > width:
        raise ValueError(f"prompt_length {int(lengths.max())} is longer than the prompt array, which has {width} slots")
    if max(width, limits.max(initial=0)) > capacity:
        raise ValueError(f"capacity={capacity} is too small: prompts have {width} slots and may grow to {limits.max()}")
    config = decoder.model.config
    inside = prompt[np.arange(width) < lengths[:, None]]
    if inside.size and not (0 <= inside.min() and inside.max() < config.vocab_size):
        raise ValueError(f"prompt holds token {int(inside.max() if inside.min() >= 0 else inside.min())}, the model's "
                         f"vocabulary is 0 to {config.vocab_size - 1}")
    if config.positions == "learned" and capacity > config.max_positions:
        raise ValueError(f"capacity={capacity} is longer than the model's {config.max_positions} learned positions")
    rows = np.arange(batch) if row_ids is None else np.asarray(row_ids)
    if rows.shape != (batch,):
        raise ValueError(f"row_ids must be [{batch}], got {list(rows.shape)}")
    return Inputs(jax.tree.map(_leaf, decoder), jax.tree.map(jnp.asarray, params), jnp.asarray(prompt, jnp.int32),
                  jnp.asarray(lengths, jnp.int32), jnp.asarray(rows, jnp.int32), _key(key),
                  jnp.asarray(limits, jnp.int32))


def check_finite(info: StepInfo) -> None:
    """Raises FloatingPointError if a step had logits that are not numbers."""
    failed = np.flatnonzero(np.asarray(info.failed))
    if failed.size:
        raise FloatingPointError(f"the model gave logits that are not finite numbers for sequence {failed[0]}: check "
                                 "the weights, or use float32")


def _leaf(value: Any) -> jax.Array:
    array = np.asarray(value)
    return jnp.asarray(array, jnp.float32 if np.issubdtype(array.dtype, np.floating) else jnp.int32)


def _key(key) -> jax.Array:
    if isinstance(key, (int, np.integer)):
        return jax.random.key(int(key))
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
