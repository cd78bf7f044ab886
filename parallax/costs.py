"""What a step costs, measured once and kept: why tokens per forward are not speed.

T(n) is the time of one target forward over n block rows, logits included. A step of a method takes T(n) and what it
does besides, which is drafting for the most part: finding or writing the draft, verifying it, committing. A plain step
takes T(1). So speedup = tokens per forward x T(1) / (T(n) + drafting), and a method gains if it accepts more than
(T(n) + drafting) / T(1) - 1 drafted tokens per step.

Times depend on the model's shape, not on its weights: they are kept per config (dtype included), batch, context, device
and version of jax, in $PARALLAX_CACHE/costs. B sequences, T block rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallax import zoo
from parallax.decoding import loop
from parallax.decoding.base import Context, Decoder, StepInfo
from parallax.decoding.sampling import argmax
from parallax.models import Block, Model

ROWS = (1, 2, 4, 8, 16, 32, 64)
_STEPS = 8              # forwards, or decoding steps, of one timed call: more than the dispatch of a call matters


@dataclasses.dataclass(frozen=True)
class Costs:
    """Milliseconds `ms` of a target forward over `rows` block rows, from 1 row up, for `batch` sequences."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    batch: int = 1

    def at(self, rows: float) -> float:
        """Between measured sizes linear, behind them with the slope of the last two."""
        if len(self.rows) > 1 and rows > self.rows[-1]:
            (a, b), (low, high) = self.rows[-2:], self.ms[-2:]
            return high + max(0.0, (high - low) / (b - a)) * (rows - b)
        return float(np.interp(rows, self.rows, self.ms))

    def relative(self, rows: float) -> float:
        """In plain steps."""
        return self.at(rows) / self.at(1)

    def doubling(self, longest: int) -> tuple[float, ...]:
        """Of 1, 2, 4, ... rows, up to the first power of two that holds `longest`: as the controllers take them."""
        return tuple(self.at(2 ** i) for i in range((longest - 1).bit_length() + 1))


def measure(model: Model, params: Mapping[str, Any], batch: int = 1, rows: Sequence[int] = ROWS, context: int = 256,
            repeats: int = 5, *, fresh: bool = False) -> Costs:
    """T(n) of a target; what was measured before is taken from the cache, unless `fresh`.

    Args:
      model, params: the target.
      batch: sequences decoded together.
      rows: block sizes; 1 is always measured.
      context: committed tokens in front of the block.
      repeats: the median of so many is taken, all sizes in alternation.
    """
    rows, context = sorted({1, *rows}), _fitting(model, context)
    store = _Store(model, batch, context)
    known = {} if fresh else {int(size): ms for size, ms in store.read("forward").items()}
    missing = [size for size in rows if size not in known]
    if missing:
        runs = {size: _forward(model, params, batch, size, context) for size in missing}
        known |= _medians(runs, repeats)
        store.write("forward", {str(size): ms for size, ms in sorted(known.items())})
    return Costs(tuple(rows), tuple(known[size] for size in rows), batch)


def draft_ms(decoder: Decoder, params: Mapping[str, Any], batch: int = 1, context: int = 256, repeats: int = 5, *,
             fresh: bool = False) -> float:
    """What a step of `decoder` takes besides the target's forward: a whole step less T(n) for the rows that it ran.

    The step, T(1) and T(n) are timed in alternation, behind a prompt of `context` tokens that repeats itself, so that
    drafts from the text exist. It is the difference of two times and as noisy as they are.
    """
    context = _fitting(decoder.model, context)
    store = _Store(decoder.model, batch, context)
    name = hashlib.sha256(repr((decoder.drafter, decoder.verifier)).encode()).hexdigest()[:16]
    known = {} if fresh else store.read("drafting")
    if name not in known:
        size = block_rows(decoder, params, batch)
        step, rows = _step(decoder, params, batch, context)
        runs = {n: _forward(decoder.model, params["target"], batch, n, context) for n in sorted({1, size})}
        ms = _medians({"step": step, **runs}, repeats)
        target = mixed_ms(Costs(tuple(runs), tuple(ms[n] for n in runs), batch), rows, size)
        known = {**store.read("drafting"), name: max(0.0, ms["step"] - target)}
        store.write("drafting", known)
    return known[name]


def mixed_ms(costs: Costs, mean: float, block: int) -> float:
    """Mean time of forwards of `block` rows and of one, as a step without a draft is, with `mean` rows on average."""
    share = (mean - 1) / (block - 1) if block > 1 else 0.0
    return (1 - share) * costs.at(1) + share * costs.at(block)


def expected_speedup(tokens_per_forward: float, target_ms: float, draft_ms: float, costs: Costs) -> float:
    """Over plain decoding, of steps that take `target_ms` in the target (`Costs.at`, `mixed_ms`) and `draft_ms`."""
    return tokens_per_forward * costs.at(1) / (target_ms + draft_ms)


def break_even(target_ms: float, draft_ms: float, costs: Costs) -> float:
    """Accepted draft tokens per step from which on a method gains."""
    return (target_ms + draft_ms) / costs.at(1) - 1


def explain(tokens_per_forward: float, rows: float, target_ms: float, draft_ms: float, costs: Costs) -> str:
    """Why tokens per forward and speed differ, in one line. `rows` per forward on average."""
    plain = costs.at(1)
    loses = break_even(target_ms, draft_ms, costs)
    size = f"{rows:.0f}" if abs(rows - round(rows)) < 0.05 else f"{rows:.1f}"
    behind = f"below {loses:.2f} accepted tokens per step it loses" if loses > 0.005 else "it never loses"
    return (f"{tokens_per_forward:.2f} tokens per forward, but a block of {size} row{'s' * (size != '1')} takes "
            f"{target_ms / plain:.2f} plain steps and drafting {draft_ms / plain:.2f}: expected "
            f"{expected_speedup(tokens_per_forward, target_ms, draft_ms, costs):.2f}x; {behind}")


def block_rows(decoder: Decoder, params: Mapping[str, Any], batch: int = 1) -> int:
    """Rows of a whole draft, the pending token included. Compiles nothing."""
    inputs = _inputs(decoder, params, batch, 16)

    def size(inputs):
        state = loop.prefill.__wrapped__(inputs, 16 + _STEPS)
        ctx = Context(decoder.model, inputs.params["target"], state.tokens, state.length, state.cache, state.key)
        return inputs.decoder.drafter.propose(inputs.params.get("draft"), state.own, ctx)[0].tokens

    return jax.eval_shape(size, inputs).shape[1]


def _fitting(model: Model, context: int) -> int:
    """A context that leaves room for blocks: positions may be a table, which ends."""
    return min(context, model.config.max_positions // 2)


def _inputs(decoder: Decoder, params, batch: int, context: int) -> loop.Inputs:
    longest = context + _STEPS * (decoder.depth + 1)
    pattern = np.random.default_rng(0).integers(0, decoder.model.config.vocab_size, min(context, 16))
    prompt = np.tile(np.resize(pattern, context), (batch, 1))
    limit = longest if longest <= decoder.model.config.max_positions else context + _STEPS
    return loop.cast(decoder, params, prompt, context, None, 0, limit, capacity=limit)


def _forward(model: Model, params, batch: int, rows: int, context: int) -> Callable[[], float]:
    """A timed call: milliseconds per forward. Each takes its tokens from the one before, so none can be left out."""
    cache = model.new_cache(batch, context + rows)._replace(length=jnp.full(batch, context, jnp.int32))
    positions = jnp.broadcast_to(context + jnp.arange(rows), (batch, rows))

    @jax.jit
    def run(params, cache, tokens):
        def body(_, tokens):
            block = Block(tokens, positions, jnp.tril(jnp.ones((rows, rows), bool)))
            return argmax(model.unembed(params, model.forward(params, block, cache).hidden))

        return jax.lax.fori_loop(0, _STEPS, body, tokens)

    tokens = jnp.zeros((batch, rows), jnp.int32)
    jax.block_until_ready(run(params, cache, tokens))                       # compiles

    def timed() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(params, cache, tokens))
        return 1e3 * (time.perf_counter() - began) / _STEPS

    return timed


def _step(decoder: Decoder, params, batch: int, context: int) -> tuple[Callable[[], float], float]:
    """(a timed call: milliseconds per step, block rows per step)."""
    inputs = _inputs(decoder, params, batch, context)
    capacity = int(inputs.limit.max())

    def run() -> tuple[float, StepInfo]:
        state = jax.block_until_ready(loop.prefill(inputs, capacity))
        began = time.perf_counter()
        _, info = jax.block_until_ready(loop.advance(inputs.decoder, inputs.params, state, jnp.int32(_STEPS)))
        return 1e3 * (time.perf_counter() - began), info

    _, info = run()                                                         # compiles
    count = int(info.target_forwards.max())                                 # of the loop
    return lambda: run()[0] / count, float(info.target_rows.max()) / count


def _medians(runs: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """Of warm calls, in alternation, so that a busy moment hits all of them alike."""
    for run in runs.values():
        run()
    times = [[run() for run in runs.values()] for _ in range(repeats)]
    return {name: statistics.median(column) for name, column in zip(runs, zip(*times))}


class _Store:
    """The JSON file of one model shape, batch, context and device; unreadable or unwritable, it holds nothing."""

    def __init__(self, model: Model, batch: int, context: int):
        device = jax.devices()[0]
        self._facts = {"config": dataclasses.asdict(model.config), "batch": batch, "context": context,
                       "device": device.device_kind, "devices": len(jax.devices()), "cpus": os.cpu_count(),
                       "jax": jax.__version__, "xla_flags": os.environ.get("XLA_FLAGS", "")}
        text = json.dumps(self._facts, sort_keys=True, default=str)
        self._path = zoo.cache() / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self, part: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path.read_bytes())[part])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(self, part: str, values: dict[str, Any]) -> None:
        content = {**self._facts, **{name: self.read(name) for name in ("forward", "drafting")}, part: values}
        with contextlib.suppress(OSError):                                  # then it is measured again next time
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".costs-", dir=self._path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1, default=str)
            os.replace(name, Path(self._path))
