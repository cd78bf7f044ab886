"""What one step costs: the bare forward by block size, the whole step over it, start-up and memory.

    python -m benchmarks.step [--model smollm2-135m] [--length 200]

Batch 1, greedy, float32. `bare` is forward, logits and argmax in a compiled loop, nothing else; `step` is the decoder's
whole step with as many rows. Both alternate in one process, minimum and median of the repeats. The floor is reading all
weights once at the rate of a bare matrix-vector product of the largest weight.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from parallax.decoding import loop, make_decoder
from parallax.decoding.sampling import argmax
from parallax.generate import LanguageModel
from parallax.models import Block

_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=200, help="committed tokens")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    lm = LanguageModel.load(args.model)
    weights = sum(x.nbytes for x in jax.tree.leaves(lm.params))
    rates = _floor(lm)
    runs = {("bare", rows): _bare(lm, rows, args.length) for rows in args.rows}
    runs |= {("step", rows): _step(lm, rows, args.length) for rows in args.rows}
    times = {key: [] for key in runs}
    for run in runs.values():
        run()
    for _ in range(args.repeats):
        for key, run in runs.items():
            times[key].append(run())
    table = Table("rows", "bare ms (min, median)", "over 1 row", "step ms (min, median)", "step / bare")
    for rows in args.rows:
        bare, step = times["bare", rows], times["step", rows]
        table.add_row(str(rows), f"{min(bare):.1f}, {statistics.median(bare):.1f}",
                      f"{min(bare) / min(times['bare', 1]):.2f}", f"{min(step):.1f}, {statistics.median(step):.1f}",
                      f"{min(step) / min(bare):.3f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"floor: {weights / 1e6:.0f} MB of weights at {rates / 1e9:.0f} GB/s = "
                  f"{1e3 * weights / rates:.1f} ms")
    for name in ("cold", "warm"):
        console.print(f"time to first token in a new process, {name} compile cache: {_first_token(args.model, name)}")


def _floor(lm) -> float:
    """Bytes per second of the largest weight's product with one column."""
    table = lm.params["target"]["embed"]["tokens"]
    run = jax.jit(lambda w, x: jax.lax.fori_loop(0, _STEPS, lambda i, x: x + (w @ x)[:x.shape[0]] * 1e-9, x))
    x = jnp.ones((table.shape[1], 1), table.dtype)
    jax.block_until_ready(run(table, x))
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready(run(table, x))
        best = min(best, (time.perf_counter() - began) / _STEPS)
    return table.nbytes / best


def _bare(lm, rows, length):
    model, params = lm.model, lm.params["target"]
    cache = model.new_cache(1, 512)._replace(length=jnp.full(1, length))

    @jax.jit
    def run(params, cache, tokens):
        def body(i, tokens):
            block = Block(tokens, length + jnp.arange(rows)[None], jnp.tril(jnp.ones((rows, rows), bool)))
            return argmax(model.unembed(params, model.forward(params, block, cache).hidden))
        return jax.lax.fori_loop(0, _STEPS, body, tokens)

    return _timed(lambda: run(params, cache, jnp.zeros((1, rows), jnp.int32)))


def _step(lm, rows, length):
    """Steps of prompt lookup with that many rows on a text that never repeats, so each step emits one token."""
    name, options = ("prompt_lookup", {"draft_length": rows - 1}) if rows > 1 else ("autoregressive", {})
    decoder = make_decoder(name, lm.model, **options)
    prompt = np.random.default_rng(0).permutation(lm.model.config.vocab_size)[:length]
    inputs = loop.cast(decoder, lm.params, [prompt], length, None, 0, length + 200, capacity=length + 200)
    states = []

    def run():
        # A step that accepted nothing has the cost of any other; what matters is the number of steps.
        states.append(loop.prefill(inputs, length + 200))
        jax.block_until_ready(states)
        began = time.perf_counter()
        _, info = loop.advance(inputs.decoder, inputs.params, states.pop(), jnp.int32(_STEPS))
        jax.block_until_ready(info)
        return 1e3 * (time.perf_counter() - began) / int(info.target_forwards[0])

    return run


def _timed(run):
    def timed():
        began = time.perf_counter()
        jax.block_until_ready(run())
        return 1e3 * (time.perf_counter() - began) / _STEPS
    return timed


_CHILD = """
import sys, time
began = time.perf_counter()
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from parallax.generate import LanguageModel
imported = time.perf_counter()
lm = LanguageModel.load(sys.argv[1])
loaded = time.perf_counter()
first = []
lm.generate(["Why is the sky blue?"], chat=True, max_new_tokens=32,
            on_tokens=lambda *_: first or first.append(time.perf_counter()))
weights = sum(x.nbytes for x in jax.tree.leaves(lm.params))
peak = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])     # ru_maxrss knows the parent's
print(f"{first[0] - began:.1f} s (import {imported - began:.1f}, load {loaded - imported:.1f}, compile and first text "
      f"{first[0] - loaded:.1f}); peak memory {peak / 1e6:.0f} MB, {peak / weights:.2f} times the weights")
"""


def _first_token(model: str, cache: str, folders={}) -> str:        # noqa: B006  the same folder for cold and warm
    import tempfile
    folder = folders.setdefault("folder", tempfile.mkdtemp())
    return subprocess.run([sys.executable, "-c", _CHILD, model, folder], capture_output=True, text=True,
                          check=True).stdout.strip()


if __name__ == "__main__":
    main()
