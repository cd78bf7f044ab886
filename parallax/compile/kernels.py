"""One kernel alone, compiled for hardware that is not there, and what it has to do.

B sequences, T block rows, K = D + 1 rows to commit, L layers, Hkv key/value heads, G query heads per key/value head,
D head size, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from parallax.compile import chips, gpu, hlo, schedule, targets, traffic
from parallax.compile.jobs import Job
from parallax.kernels import attention, commit, vocabulary
from parallax.models.cache import Cache

Struct = jax.ShapeDtypeStruct


class Case(NamedTuple):
    """A call of a kernel with shapes of one device.

    called: its name in `pallas_call`; nbytes, flops: what it has to move through HBM and to multiply; donated: operands
    that are updated in place; axis: how long an axis of the grid is whose length an operand decides, by the shapes of
    the grid step's blocks.
    """

    called: str
    function: Callable
    operands: tuple[Any, ...]
    nbytes: int
    flops: int
    donated: tuple[int, ...] = ()
    axis: Callable[[tuple[tuple[int, ...], ...]], int] = lambda windows: 1


class Report(NamedTuple):
    """A kernel on a target.

    Attributes:
      reason: why it does not compile, or None.
      memory: bytes of VMEM, or of a thread block's shared memory.
      registers, spills: of a GPU's thread, and the bytes that it keeps in memory because they do not suffice; on a TPU
        `spills` are stores and loads of spilled registers in a grid step.
      grid: number of grid steps, or of thread blocks.
      bundles: of a grid step, see `schedule.Schedule.step`; used: what share of each unit's slots they take.
      nbytes, flops: what a call has to move and to multiply.
      least: seconds that this takes at least; by: what sets it.
      scheduled: seconds of the schedule, without stalls; None for a GPU. certain: whether it says how often all of its
        loops run, else it takes at least so long.
    """

    kernel: str
    target: str
    rows: int
    reason: str | None
    memory: int = 0
    registers: int | None = None
    spills: int | None = None
    grid: int = 0
    bundles: int | None = None
    used: Mapping[str, float] = {}
    nbytes: int = 0
    flops: int = 0
    least: float = 0.0
    by: str = ""
    scheduled: float | None = None
    certain: bool = True


def compiled(name: str, job: Job, dump: str) -> list[Report]:
    """Compiles the kernel `name` of `CASES` with the shapes of the job; a GPU's may be several.

    Args:
      dump: the folder of libtpu's dumps, see `targets.set_environment`; it is emptied.
    """
    case = CASES[name](job)
    if job.target.chip.kind == "gpu":
        return [_blank(name, job, case)._replace(reason=one.reason, memory=one.shared, registers=one.registers,
                                                 spills=one.spills, grid=math.prod(one.grid))
                for one in gpu.compiled(case.function, *case.operands, archs=(job.target.chip.name,))]
    where = NamedSharding(targets.mesh(dataclasses.replace(job.target, tensor=1)), PartitionSpec())
    operands = jax.tree.map(lambda leaf: Struct(leaf.shape, leaf.dtype, sharding=where), case.operands)
    with schedule.emptied(dump) as folder:
        try:
            done = jax.jit(case.function, donate_argnums=case.donated).lower(*operands).compile()
        except Exception as error:  # of Mosaic or XLA: their classes differ by version
            return [_blank(name, job, case)._replace(reason=targets.explained(error))]
        vmem = traffic.kernels(hlo.parse(done.as_text()))[case.called].vmem
        return [report(name, job, vmem, schedule.read(folder, case.called))]


def report(name: str, job: Job, vmem: int, plan: schedule.Schedule | None) -> Report:
    """Of a kernel that was compiled for a TPU; without a schedule its time is unknown."""
    case = CASES[name](job)
    blank = _blank(name, job, case)._replace(memory=vmem)
    if plan is None:
        return blank
    steps = math.prod(case.axis(plan.windows) if size is None else size for size in plan.grid)
    rounds = math.ceil(steps / job.target.chip.cores)
    return blank._replace(grid=steps, bundles=plan.step, used=plan.used, spills=plan.spills,
                          certain=plan.certain,
                          scheduled=chips.seconds(job.target.chip, rounds * plan.step))


def _blank(name: str, job: Job, case: Case) -> Report:
    least = chips.bound(job.target.chip, case.nbytes, case.flops)
    return Report(name, job.target.name, job.rows, None, nbytes=case.nbytes, flops=case.flops, least=least.seconds,
                  by=least.by)


def _attention(job: Job) -> Case:
    config, batch, rows, size = job.config, job.batch, job.rows, job.config.head_dim
    heads, group = job.kv_heads, config.num_heads // config.num_kv_heads
    item = jnp.dtype(config.dtype).itemsize
    own = Struct((batch, heads, rows, size), config.dtype)
    stored = _stored(job)
    # Where layers differ, it is the one that reads more.
    window = config.sliding_window if all(map(config.sliding, range(config.num_layers))) else None

    def run(q, k, v, ck, cv, length, layer, visible, positions):
        return attention.attend(q, k, v, Cache(ck, cv, length), layer, visible=visible, positions=positions,
                                key_positions=positions, scale=config.scale, softcap=config.attention_softcap,
                                window=window, kernels="pallas")

    def axis(windows):
        # The blocks of the cache are [1, 1, H, N, D] or [1, 1, H, D, N].
        shape = next(shape for shape in windows if len(shape) == 5)
        return math.ceil(job.context / (math.prod(shape[3:]) // size))

    live = min(job.context, window or job.context)
    return Case(
        "attention", run,
        (Struct((batch, heads, group, rows, size), config.dtype), own, own, stored, stored, *_ints((batch,), ()),
         Struct((batch, rows, rows), jnp.bool_), *_ints((batch, rows))),
        2 * batch * heads * size * (live + rows + group * rows) * item,
        4 * batch * heads * group * rows * (live + rows) * size, axis=axis)


def _commit(job: Job) -> Case:
    config, rows = job.config, job.levels + 1
    block = Struct((job.batch, job.rows, job.kv_heads, config.head_dim), config.dtype)
    blocks = (block,) * config.num_layers

    def run(stored, new, rows, length):
        return commit.commit(stored, new, rows, length, "pallas")

    moved = 2 * config.num_layers * job.batch * job.kv_heads * rows * config.head_dim
    return Case("commit", run, ((_stored(job),) * 2, (blocks,) * 2, *_ints((job.batch, rows), (job.batch,))),
                2 * moved * jnp.dtype(config.dtype).itemsize, 0, donated=(0,))


def _statistics(job: Job, want: tuple[str, ...] = (), noise: bool = False) -> Case:
    rows = Struct(_logits(job), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (job.batch, job.rows)))
    own = tuple(range(job.rows))

    def run(logits, keys):
        chosen = vocabulary.Noise(keys, jnp.asarray(own)) if noise else None
        return vocabulary.statistics(logits, want, noise=chosen, kernels="pallas")

    return Case("vocabulary", run, (rows, keys), math.prod(rows.shape) * 4, 0)


def _residual(job: Job) -> Case:
    batch, rows, size = _logits(job)
    law = Struct((batch, max(rows - 1, 1), size), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    numbers = Struct((batch, rows), jnp.float32)
    return Case("leftovers", partial(vocabulary.residual, kernels="pallas"),
                (Struct((batch, rows, size), jnp.float32), numbers, numbers, law, *_ints((batch,)),
                 Struct((batch,), jnp.bool_), keys), 2 * batch * size * 4, 0)


def _stored(job: Job) -> Struct:
    config = job.config
    return Struct((config.num_layers, job.batch, job.kv_heads, job.capacity, config.head_dim), config.dtype)


def _logits(job: Job) -> tuple[int, int, int]:
    return job.batch, job.rows, job.config.vocab_size


def _ints(*shapes: tuple[int, ...]) -> list[Struct]:
    return [Struct(shape, jnp.int32) for shape in shapes]


# verify: greedy; draw: the target's own token at every node, by noise; residual: of the node where a draft fell.
CASES: dict[str, Callable[[Job], Case]] = {
    "attention": _attention,
    "commit": _commit,
    "verify": partial(_statistics, want=("best", "lse")),
    "draw": partial(_statistics, want=("lse",), noise=True),
    "residual": _residual,
    "unmask": partial(_statistics, want=("best", "second", "lse", "mean")),
}
# What a kernel of a compiled step is among them, by its name there.
IN_A_STEP = {"attention": "attention", "commit": "commit", "vocabulary": "verify"}
