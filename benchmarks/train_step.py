"""Tokens per second of a training step against the time of its matrix products alone, on this machine.

    python -m benchmarks.train_step [--config tiny_target] [--rounds 5]

The floor runs every matrix product of one step, forward and backward (weights, head and attention), at its real size
and in the layout of the model, and nothing else. Both are compiled and warm; medians over rounds in alternation.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from parallax import sharding
from parallax.models import Model, ModelConfig
from parallax.train.data import Batch
from parallax.train.loop import Program, Schedule
from parallax.train.objectives import NextToken
from parallax.train.optimizer import Optimizer
from parallax.train.setup import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny_target", help="of configs/train")
    parser.add_argument("--vocab_size", type=int, default=1024, help="where the config leaves it to the tokenizer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="per round")
    args = parser.parse_args()
    config = runpy.run_path(f"configs/train/{args.config}.py")["get_config"]().to_dict()
    fields = config["model"] | {"vocab_size": config["model"]["vocab_size"] or args.vocab_size}
    model = Model(build(ModelConfig, fields, "model"))
    rows, length = config["batch_size"], config["sequence_length"]
    program = Program(objective=NextToken(model=model), optimizer=build(Optimizer, config["optimizer"], "optimizer"),
                      schedule=Schedule(steps=1000), mesh=sharding.make_mesh(), seed=0)
    random = np.random.default_rng(0)
    ones = np.ones((rows, length), np.int32)
    batch = program.put(Batch(random.integers(0, model.config.vocab_size, (rows, length), np.int32), ones,
                              np.arange(length, dtype=np.int32) * ones, ones.astype(np.float32)))
    state = program.create()
    products, operations = floor(model.config, rows, length)

    def step():
        nonlocal state
        for _ in range(args.steps):
            state, metrics = program.step(state, None, batch)
        jax.block_until_ready(metrics)

    def bare():
        for _ in range(args.steps):
            jax.block_until_ready(products())

    times = {"step": [], "matrix products alone": []}
    step(), bare()
    for _ in range(args.rounds):
        for name, work in (("step", step), ("matrix products alone", bare)):
            began = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - began) / args.steps)
    table = Table("", "ms", "tokens/s", "GFLOP/s", "of the floor")
    best = statistics.median(times["matrix products alone"])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        table.add_row(name, f"{1e3 * middle:.1f}", f"{rows * length / middle:,.0f}", f"{operations / middle / 1e9:.0f}",
                      f"{best / middle:.2f}")
    Console().print(table)


def floor(config: ModelConfig, rows: int, length: int):
    """(a function that runs all products of one training step, their floating-point operations)."""
    tokens = rows * length
    e, f, d, v = config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size
    h, kv = config.num_heads, config.num_kv_heads
    layer = [((h + 2 * kv) * d, e), (e, h * d), (f, e), (e, f)] + [(f, e)] * config.gated_mlp
    key = jax.random.key(0)
    weights = [jax.random.normal(key, shape) for shape in (layer * config.num_layers + [(v, e)])]
    inputs = [jax.random.normal(key, (w.shape[1], tokens)) for w in weights]
    grads = [jax.random.normal(key, (w.shape[0], tokens)) for w in weights]
    q = jax.random.normal(key, (rows, kv, h // kv * length, d))
    k = jax.random.normal(key, (rows, kv, length, d))
    scores = jax.random.normal(key, (rows, kv, h // kv * length, length))

    @jax.jit
    def run(weights, inputs, grads, q, k, scores):
        out = []
        for w, x, g in zip(weights, inputs, grads):
            out += [w @ x, w.T @ g, g @ x.T]
        for _ in range(config.num_layers):
            q = q * 1.0001                                  # another operand per layer, or XLA computes it once
            a, b = scores * q[0, 0, 0, 0], scores * q[0, 0, 0, 1]
            out += [jnp.einsum("bkrd,bksd->bkrs", q, k), jnp.einsum("bkrs,bksd->bkrd", a, k),              # forward
                    jnp.einsum("bkrd,bksd->bkrs", q * 2, k), jnp.einsum("bkrs,bkrd->bksd", a, q),          # of values
                    jnp.einsum("bkrs,bksd->bkrd", b, k), jnp.einsum("bkrs,bkrd->bksd", b, q)]              # of scores
        return [x.ravel()[0] for x in jax.lax.optimization_barrier(out)]

    operations = 6 * tokens * sum(w.size for w in weights) + 6 * 2 * config.num_layers * rows * h * length ** 2 * d
    return lambda: run(weights, inputs, grads, q, k, scores), operations


if __name__ == "__main__":
    main()
