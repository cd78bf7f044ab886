"""The whole decode step, compiled for TPUs that are not there, and what its text says.

B sequences, T block rows, L layers, Hkv key/value heads, D head size, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallax import sharding
from parallax.compile import chips, hlo, targets
from parallax.compile.jobs import Job
from parallax.decoding import Speculative
from parallax.decoding.base import DecodeState, Draft, Drafter, policy, static
from parallax.models import Model


class Program(NamedTuple):
    """One step on each device.

    Attributes:
      reason: why it does not compile, which is how libtpu says that it does not fit, or None.
      arguments, temporary: bytes of HBM; the state is donated, so the results lie where it was.
      weights, live: bytes that any step has to read: all weights but the table that only single rows are taken from,
        and the committed keys and values.
      flops: of its matrix products.
      cost: what its text says.
      other_bytes: of each of its kernels all operands and results, in full.
      cache_copies, weight_gathers: instructions that copy the whole cache, or bring a weight of all devices to each.
    """

    reason: str | None
    arguments: int = 0
    temporary: int = 0
    weights: int = 0
    live: int = 0
    flops: float = 0.0
    cost: hlo.Cost = hlo.Cost()
    other_bytes: Mapping[str, int] = {}
    cache_copies: tuple[str, ...] = ()
    weight_gathers: tuple[str, ...] = ()


class KernelCost(NamedTuple):
    """Of one call of a kernel: bytes through HBM, and the seconds of its schedule."""

    nbytes: float
    seconds: float


@policy
class Rows(Drafter):
    """A draft of a given shape that costs nothing: its tokens are the last ones of the text."""

    parents: tuple[int, ...] = static()
    depth: int = static()

    def propose(self, params, own, ctx):
        places = ctx.length[:, None] - 1 - jnp.arange(len(self.parents))
        tokens = jnp.take_along_axis(ctx.tokens, jnp.maximum(places, 0), 1)
        return Draft(tokens, self.parents, jnp.ones_like(tokens, bool), depth=self.depth, certain=True), own


def compiled(job: Job) -> Program:
    """Compiles `Speculative.step`: forward over the cache, unembedding, greedy verification of a draft, commit.

    The draft is given (`Rows`), so the program holds what all methods that verify drafts share. Layers are scanned.
    """
    mesh = targets.mesh(job.target)
    params, state = operands(job, mesh)
    decoder = Speculative(model=Model(_scanned(job)), drafter=Rows(parents=job.parents, depth=job.levels))
    with jax.set_mesh(mesh):
        lowered = jax.jit(decoder.step, donate_argnums=1).lower(params, state)
    try:
        done = lowered.compile()
    except Exception as error:  # XLA's own classes differ by version
        return Program(" ".join(str(error).split("\n\n")[0].split()))
    memory, program = done.memory_analysis(), hlo.parse(done.as_text())
    local = _local_shapes((state.cache.k, state.cache.v))
    weights = _local_bytes(params) - (0 if job.config.tie_embeddings else _local_bytes(params["target"]["embed"]))
    return Program(
        None, memory.argument_size_in_bytes, memory.temp_size_in_bytes, weights, _live_bytes(job), flops(job),
        hlo.cost(program), {name: facts.nbytes for name, facts in hlo.kernels(program).items()},
        tuple(hlo.rewritten(program, local)), tuple(hlo.gathered(program, _whole_shapes(params))))


def operands(job: Job, mesh: Mesh) -> tuple[Any, DecodeState]:
    """(parameters, state) as shapes with the shardings of `parallax.sharding`; the cache is split by heads."""
    model = Model(_scanned(job))
    params = {"target": sharding.abstract(jax.eval_shape(lambda: model.init(jax.random.key(0))), mesh)}
    batch, slots = job.batch, job.capacity

    def state():
        number = jnp.zeros((batch,), jnp.int32)
        return DecodeState(jnp.zeros((batch, slots), jnp.int32), number, number, jnp.zeros((batch,), bool),
                           jax.random.split(jax.random.key(0), batch), model.new_cache(batch, slots), ())

    def placed(leaf):
        heads = leaf.ndim == 5 and leaf.shape[2] % mesh.shape["tensor"] == 0                # [L, B, Hkv, S, D]
        where = NamedSharding(mesh, PartitionSpec(None, None, "tensor") if heads else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return params, jax.tree.map(placed, jax.eval_shape(state))


def flops(job: Job) -> float:
    """Operations of the step's matrix products, on one device."""
    config, rows = job.config, job.batch * job.rows
    heads, size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * size + (2 + config.gated_mlp) * config.intermediate_size)
    products = config.num_layers * layer + config.hidden_size * (config.draft_vocab or config.vocab_size)
    attention = 2 * config.num_layers * heads * (job.context + job.rows)
    return 2 * rows * (products + attention) / job.target.tensor


def accessed(program: Program, kernels: Mapping[str, KernelCost]) -> float:
    """Bytes through HBM in a step. `kernels`: by name; of others all operands and results count."""
    return program.cost.nbytes + sum(
        count * (kernels[name].nbytes if name in kernels else program.other_bytes[name])
        for name, count in program.cost.kernels.items())


def predicted(job: Job, program: Program, kernels: Mapping[str, KernelCost]) -> float:
    """Seconds of a step: XLA's estimates of its operations, the kernels' schedules, the collectives one by one.

    Nothing of it is faster than HBM allows.
    """
    chip, bandwidth = job.target.chip, job.target.chip.hbm_gbs * 1e9 / job.target.chip.devices
    total = max(chips.seconds(chip, program.cost.cycles), program.cost.nbytes / bandwidth)
    for name, count in program.cost.kernels.items():
        one = kernels.get(name, KernelCost(program.other_bytes[name], 0.0))
        total += count * max(one.seconds, one.nbytes / bandwidth)
    return total + sum(count * chips.wire_seconds(chip, name, nbytes, job.target.tensor)
                       for (name, nbytes), count in program.cost.collectives.items())


def _scanned(job: Job):
    return job.config.replace(scan_layers=True)


def _live_bytes(job: Job) -> int:
    size = 2 * job.config.num_layers * job.batch * job.kv_heads * job.context * job.config.head_dim
    return size * jnp.dtype(job.config.dtype).itemsize


def _local_shapes(tree) -> set[tuple[int, ...]]:
    """Of every array, on one device."""
    return {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree)}


def _whole_shapes(params) -> set[tuple[int, ...]]:
    """Of every weight that devices share, whole: of all layers, and of one."""
    shared = [leaf for leaf in jax.tree.leaves(params) if leaf.sharding.shard_shape(leaf.shape) != leaf.shape]
    return {shape for leaf in shared for shape in (leaf.shape, leaf.shape[1:] if leaf.ndim == 3 else leaf.shape)}


def _local_bytes(tree) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
               for leaf in jax.tree.leaves(tree))
