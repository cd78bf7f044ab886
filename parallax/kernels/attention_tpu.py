"""Attention of a block over the committed prefix and over itself, on TPU.

B batch, T block rows, C context rows, L layers, Hkv key/value heads, G query heads per key/value head, D head size,
S slots, R = G T query rows of one key/value head, H key/value heads and N slots of one grid step.

The grid is batch x groups of H heads x blocks of N slots; its last axis is as long as the longest sequence needs. A
shorter sequence idles in its first steps, not in its last ones: the pipeline fetches one step ahead, so its first
block arrives while the sequence before it is still computed.

The step is bound by memory only if little is done per score: masks are for blocks that the length or the window cuts,
the maximum is kept in all lanes of [R, 128], row sums stay one per lane until the end, and all heads of a step are
straight-line code, so that the compiler runs the matrix products of one head beside the softmax of another.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped

_MASKED = -1e30
_LANES = 128
_STEP_BYTES = 1 << 20   # keys and values of a grid step: hides the step's own cost; twice this is in VMEM
_STEP_ROWS = 1024       # H x R at most
_STEP_SCORES = 1 << 19  # H x R x N at most: all of it is straight-line code
_UPDATE = 512           # slots of one softmax update: the fewer, the more often results are rescaled


class _Scalars(NamedTuple):
    """What index maps and kernel read from scalar memory.

    layer [1]; length [B]; shift [B]: grid step i is for slot block i + shift; first [B]: at blocks below it the step
    is idle; front [B]: slots below it are out of some row's window; scales: k and v factors [L, Hkv], or None.
    """

    layer: jax.Array
    length: jax.Array
    shift: jax.Array
    first: jax.Array
    front: jax.Array
    scales: tuple[jax.Array, jax.Array] | None


def attend(q: Float[Array, "B Hkv G T D"], k: Float[Array, "B Hkv CT D"], v: Float[Array, "B Hkv CT D"],
           ck: Shaped[Array, "L B Hkv S D"], cv: Shaped[Array, "L B Hkv S D"], length: Int[Array, "B"],
           layer: Int[Array, ""], visible: Bool[Array, "B T CT"], positions: Int[Array, "B T"],
           window: Int[Array, ""] | None = None, scales: tuple[Array, Array] | None = None,
           *, softcap: float | None, interpret: bool = False) -> Float[Array, "B Hkv G T D"]:
    """`parallax.kernels.attention.reference` as a TPU kernel; the arguments are the same.

    Args:
      interpret: True, or `pltpu.InterpretParams()`, to run without a TPU.
    """
    batch, heads, group, block, size = q.shape
    rows, slots = group * block, ck.shape[3]
    together, step = _tiles(batch, heads, rows, slots, size, ck.dtype.itemsize)
    last = jnp.maximum(pl.cdiv(length, step) - 1, 0)
    if window is None:
        since = None
        first = front = jnp.zeros_like(length)
    else:
        since = positions - window + 1
        first = jnp.clip(since.min(1) // step, 0, last)
        front = since.max(1)
        since = jnp.tile(since, (1, group))[:, :, None]
    steps = (last - first).max() + 1
    scalars = _Scalars(jnp.reshape(layer, 1), length, last + 1 - steps, first, front, scales)
    bias = jnp.where(jnp.tile(visible, (1, group, 1)), 0.0, _MASKED)
    if k.shape[2] == 1:   # Mosaic has no product with a single column
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 7), (0, 0))) for x in (k, v))
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 7)), constant_values=_MASKED)
    own = k.shape[2]
    slot_axis = 4 if slots_last(slots, size) else 3
    if slot_axis == 4:
        ck, cv = ck.swapaxes(3, 4), cv.swapaxes(3, 4)
    # Else XLA may bring all of a small cache to VMEM first. jax 0.7 cannot say so to a grid of traced length.
    if not interpret and jax.__version_info__ >= (0, 8):
        ck, cv = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (ck, cv))

    def per_head(*shape):
        return pl.BlockSpec((1, together, *shape), lambda b, h, i, s: (b, h, 0, 0))

    def per_row(width):
        return pl.BlockSpec((1, rows, width), lambda b, h, i, s: (b, 0, 0))

    def of_block(b, h, i, s):
        at = jnp.maximum(i + s.shift[b], s.first[b])
        return (s.layer[0], b, h, at, 0) if slot_axis == 3 else (s.layer[0], b, h, 0, at)

    stored = pl.BlockSpec((1, 1, together, *((step, size) if slot_axis == 3 else (size, step))), of_block)
    scores = batch * heads * rows * (slots + own)
    mixed = pl.pallas_call(
        partial(_kernel, slot_axis=slot_axis, softcap=softcap),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows, size), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads // together, steps),
            in_specs=[per_head(rows, size), per_head(own, size), per_head(own, size), per_row(own),
                      None if since is None else per_row(1), stored, stored],
            out_specs=per_head(rows, size),
            scratch_shapes=[pltpu.VMEM((together, rows, width), jnp.float32) for width in (_LANES, _LANES, size)]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * size, transcendentals=scores,
            bytes_accessed=2 * (q.nbytes + k.nbytes + batch * heads * slots * size * ck.dtype.itemsize)),
        interpret=interpret,
        name="attention",
    )(scalars, q.reshape(batch, heads, rows, size), k, v, bias, since, ck, cv)
    return mixed.reshape(q.shape)


def slots_last(slots: int, size: int) -> bool:
    """Whether XLA lays [..., S, D] out on a TPU with S in the lanes, which it does where that fills the tiles better.

    A kernel has to take a cache as it lies in memory, or else XLA copies all of it at each call.
    """
    def padded(rows, lanes):
        return pl.cdiv(rows, 8) * 8 * pl.cdiv(lanes, _LANES) * _LANES

    return padded(size, slots) < padded(slots, size)


def _tiles(batch: int, heads: int, rows: int, slots: int, size: int, itemsize: int) -> tuple[int, int]:
    """(H, N)."""
    # A chip of two cores divides the batch between them, or else the heads.
    most = heads if batch > 1 else max(heads // 2, 1)
    together = max(h for h in range(1, most + 1) if heads % h == 0 and (h == 1 or h * rows <= _STEP_ROWS))
    step = min(_STEP_BYTES // (2 * together * size * itemsize), _STEP_SCORES // (together * rows))
    return together, 1 << min(max(step, 2 * _LANES), max(slots, _LANES)).bit_length() - 1


def _kernel(s, q, k, v, bias, since, ck, cv, out, top, total, mixed, *, slot_axis, softcap):
    b, i = pl.program_id(0), pl.program_id(2)
    together, rows, size = q.shape[1:]
    head = pl.program_id(1) * together
    step = ck.shape[slot_axis]
    update = min(step, _UPDATE)
    block = i + s.shift[b]
    start = block * step
    active = block >= s.first[b]
    is_last = i == pl.num_programs(2) - 1
    cut = is_last if since is None else is_last | (start < s.front[b])

    def product(x, y, axis):
        return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)

    def factor(which, h):
        return 1 if s.scales is None else s.scales[which][s.layer[0], head + h]

    def score(h, keys, axis, scale=1):
        x = product(q[0, h], keys.astype(q.dtype), axis)
        if softcap is None:
            return x * scale
        return softcap * jnp.tanh(x * (scale / softcap))

    def own(h):
        """Starts the softmax with the block itself."""
        x = score(h, k[0, h], 1) + bias[0]
        now = x.max(1, keepdims=True)
        weights = jnp.exp(x - now)
        lane = lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
        top[h] = jnp.broadcast_to(now, (rows, _LANES))
        total[h] = jnp.where(lane == 0, weights.sum(1, keepdims=True), 0)
        mixed[h] = product(weights.astype(v.dtype), v[0, h], 0)

    def add(h, at, seen=None):
        """Goes on with slots `at` to `at + update` of the block."""
        span = (0, 0, h, *(slice(None) for _ in range(slot_axis - 3)), pl.ds(at, update))
        keys, values = ck[span], cv[span].astype(v.dtype)
        x = score(h, keys, 4 - slot_axis, factor(0, h))
        if seen is not None:
            x = jnp.where(seen, x, _MASKED)
            # Slots behind the length may hold anything, and 0 * nan is nan.
            slot = start + at + lax.broadcasted_iota(jnp.int32, values.shape, slot_axis - 3)
            values = jnp.where(slot < s.length[b], values, 0)
        now = jnp.maximum(top[h], x.max(1, keepdims=True))
        shrink = jnp.exp(top[h] - now)
        weights = jnp.exp(x - _wide(now, update))
        top[h] = now
        total[h] = sum((weights[:, lane:lane + _LANES] for lane in range(0, update, _LANES)), total[h] * shrink)
        part = product(weights.astype(v.dtype), values, slot_axis - 3)
        mixed[h] = mixed[h] * _wide(shrink, size) + part * factor(1, h)

    @pl.when(i == 0)
    def _():
        for h in range(together):
            own(h)

    @pl.when(active & jnp.logical_not(cut))
    def _():
        for h in range(together):
            for at in range(0, step, update):
                add(h, at)

    @pl.when(active & cut)
    def _():
        @pl.loop(0, jnp.minimum(pl.cdiv(s.length[b] - start, update), step // update))
        def _(part):
            at = pl.multiple_of(part * update, update)
            slot = start + at + lax.broadcasted_iota(jnp.int32, (rows, update), 1)
            seen = slot < s.length[b]
            if since is not None:
                seen &= slot >= since[0]
            for h in range(together):
                add(h, at, seen)

    @pl.when(is_last)
    def _():
        for h in range(together):
            out[0, h] = (mixed[h] / total[h].sum(1, keepdims=True)).astype(out.dtype)


def _wide(x, size):
    """x [R, 128], the same in all lanes, with `size` lanes."""
    return jnp.concatenate([x] * pl.cdiv(size, _LANES), 1)[:, :size]
