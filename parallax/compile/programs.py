"""The whole decode step, compiled for TPUs that are not there, and what its text and its schedules say.

B sequences, T block rows, L layers, Hkv key/value heads, D head size, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallax import sharding
from parallax.compile import chips, hlo, kernels, schedule, targets, traffic
from parallax.compile.jobs import Job
from parallax.decoding import Speculative
from parallax.decoding.base import DecodeState, Draft, Drafter, policy, static
from parallax.models import Model


class Step(NamedTuple):
    """One step on each device.

    Attributes:
      reason: why it does not compile, which is how libtpu says that it does not fit, or None.
      arguments, temporary: bytes of HBM; the state is donated, so the results lie where it was.
      least_bytes: that any step has to read: all weights but the table that only single rows are taken from, and the
        committed keys and values.
      accessed: bytes through HBM, see `traffic`; of kernels what they have to move.
      least, by: seconds that the least bytes and the products take, and what sets it.
      predicted: seconds of all operations, one after the other: the bytes of each at the HBM's bandwidth or its
        schedule, whichever takes longer, and the collectives.
      wire: seconds of the collectives.
      kernels: how often each runs; collectives: how many run.
      cache_copies, weight_copies, weight_gathers: instructions that copy the whole cache or the part of a weight that
        a device has, or bring a weight that devices share to each.
    """

    target: str
    rows: int
    reason: str | None
    arguments: int = 0
    temporary: int = 0
    least_bytes: int = 0
    accessed: float = 0.0
    flops: float = 0.0
    least: float = 0.0
    by: str = ""
    predicted: float = 0.0
    wire: float = 0.0
    kernels: Mapping[str, int] = {}
    collectives: int = 0
    cache_copies: Sequence[str] = ()
    weight_copies: Sequence[str] = ()
    weight_gathers: Sequence[str] = ()


@policy
class Rows(Drafter):
    """A draft of a given shape that costs nothing: its tokens are the last ones of the text."""

    parents: tuple[int, ...] = static()
    depth: int = static()

    def propose(self, params, own, ctx):
        places = ctx.length[:, None] - 1 - jnp.arange(len(self.parents))
        tokens = jnp.take_along_axis(ctx.tokens, jnp.maximum(places, 0), 1)
        return Draft(tokens, self.parents, jnp.ones_like(tokens, bool), depth=self.depth, certain=True), own


def compiled(job: Job, dump: str) -> tuple[Step, list[kernels.Report]]:
    """Compiles `Speculative.step`: forward over the cache, unembedding, greedy verification of a draft, commit.

    The draft is given (`Rows`), so the program holds what all methods that verify drafts share. Layers are scanned.

    Args:
      dump: the folder of libtpu's dumps, see `targets.set_environment`; it is emptied.
    """
    mesh = targets.mesh(job.target)
    params, state = operands(job, mesh)
    with schedule.emptied(dump) as folder:
        try:
            with jax.set_mesh(mesh):
                done = jax.jit(decoder(job).step, donate_argnums=1).lower(params, state).compile()
        except Exception as error:  # XLA's own classes differ by version
            return Step(job.target.name, job.rows, targets.explained(error)), []
        program = hlo.parse(done.as_text())
        inside = traffic.kernels(program)
        reports = {name: kernels.report(kernels.IN_A_STEP[name], job, facts.vmem, schedule.read(folder, name))
                   for name, facts in inside.items() if name in kernels.IN_A_STEP}
        return _step(job, params, state, done.memory_analysis(), program, folder, inside, reports), [*reports.values()]


def decoder(job: Job) -> Speculative:
    """The method whose step is compiled."""
    return Speculative(model=_model(job), drafter=Rows(parents=job.parents, depth=job.levels))


def operands(job: Job, mesh: Mesh) -> tuple[Any, DecodeState]:
    """(parameters, state) as shapes with the shardings of `parallax.sharding`; the cache is split by heads."""
    model, batch, slots = _model(job), job.batch, job.capacity
    params = {"target": sharding.abstract(jax.eval_shape(lambda: model.init(jax.random.key(0))), mesh)}

    def state():
        number = jnp.zeros((batch,), jnp.int32)
        return DecodeState(jnp.zeros((batch, slots), jnp.int32), number, number, jnp.zeros((batch,), bool),
                           jax.random.split(jax.random.key(0), batch), model.new_cache(batch, slots), ())

    def placed(leaf):
        heads = leaf.ndim == 5                                                              # [L, B, Hkv, S, D]
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


def _step(job, params, state, memory, program, folder, inside, reports) -> Step:
    chip, length = job.target.chip, schedule.lengths(folder)
    bandwidth = chip.hbm_gbs * 1e9 / chip.devices

    def seconds(instruction, nbytes):
        bundles = length.get(instruction.name, 0) * hlo.iterations(instruction)
        return max(nbytes / bandwidth, chips.seconds(chip, bundles))

    cost = traffic.cost(program, seconds)
    nbytes = {name: reports[name].nbytes if name in reports else facts.nbytes for name, facts in inside.items()}
    in_kernels = sum(count * max(nbytes[name] / bandwidth, name in reports and reports[name].scheduled or 0.0)
                     for name, count in cost.kernels.items())
    wire = sum(count * chips.wire_seconds(chip, name, size, job.target.tensor)
               for (name, size), count in cost.collectives.items())
    table = 0 if job.config.tie_embeddings else _local_bytes(params["target"]["embed"])
    live = job.context * _local_bytes((state.cache.k, state.cache.v)) // job.capacity
    needed = _local_bytes(params) - table + live
    least = chips.bound(chip, needed, flops(job))
    weights = _shapes(params)
    caches = {leaf.sharding.shard_shape(leaf.shape) for leaf in (state.cache.k, state.cache.v)}
    return Step(
        job.target.name, job.rows, None, memory.argument_size_in_bytes, memory.temp_size_in_bytes, needed,
        cost.nbytes + sum(count * nbytes[name] for name, count in cost.kernels.items()), flops(job), least.seconds,
        least.by, cost.seconds + in_kernels + wire, wire, dict(cost.kernels), sum(cost.collectives.values()),
        traffic.rewritten(program, caches), traffic.rewritten(program, {local for local, _ in weights}),
        traffic.gathered(program, {whole for local, whole in weights if whole != local}))


def _model(job: Job) -> Model:
    return Model(job.config.replace(scan_layers=True))


def _shapes(params) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(on one device, whole) of every matrix: of all layers, and of one."""
    pairs = {(leaf.sharding.shard_shape(leaf.shape), leaf.shape) for leaf in jax.tree.leaves(params)}
    pairs |= {(local[1:], whole[1:]) for local, whole in pairs if len(whole) == 3}
    return {(local, whole) for local, whole in pairs if len(whole) > 1}


def _local_bytes(tree) -> int:
    """On one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
               for leaf in jax.tree.leaves(tree))
