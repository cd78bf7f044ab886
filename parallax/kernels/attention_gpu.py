"""Attention of a block over the committed prefix and over itself, on GPU (Triton).

B batch, T block rows, C context rows, L layers, Hkv key/value heads, G query heads per key/value head, D head size,
S slots. The G T query rows of a key/value head are one axis, cut into tiles of R rows; keys come in tiles of N.

What a sequence reads, its live tiles of the cache and the tiles of the block itself, is dealt out evenly to several
programs ("splits"), so that few heads over a long prefix still fill the GPU; their maxima, sums and mixed values are
combined afterwards ("Flash-Decoding for long-context inference", Dao et al. 2023). Triton wants powers of two: tiles
are padded, and loads are masked where an array ends inside one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30
_LOG2E = math.log2(math.e)
_SMALLEST = 16         # side of a matrix product
_WARPS = 8 * 132       # on the streaming multiprocessors of an H100: for each, two programs of four or one of eight
_SPLIT_SLOTS = 256     # combining splits of fewer slots would take longer than reading them


class _Tiles(NamedTuple):
    """R query rows, N slots, N columns of the block itself, splits; warps and stages of the pipeline of loads."""

    rows: int
    slots: int
    own: int
    splits: int
    warps: int
    stages: int


def attend(q: Float[Array, "B Hkv G T D"], k: Float[Array, "B Hkv CT D"], v: Float[Array, "B Hkv CT D"],
           ck: Array, cv: Array, length: Int[Array, "B"], layer: Int[Array, ""], visible: Bool[Array, "B T CT"],
           positions: Int[Array, "B T"], window: Int[Array, ""] | None = None,
           scales: tuple[Float[Array, "L Hkv"], Float[Array, "L Hkv"]] | None = None, *, softcap: float | None,
           splits: int | None = None, interpret: bool = False) -> Float[Array, "B Hkv G T D"]:
    """As `parallax.kernels.attention.reference`, whose arguments these are. ck, cv: [L, B, Hkv, S, D].

    Args:
      splits: programs that share the keys of one head of one sequence; None chooses by the shapes.
      interpret: True runs it without a GPU.
    """
    batch, heads, group, block, size = q.shape
    rows = group * block
    tiles = _tiles(q, k, ck, splits)
    if tiles.splits == 1:
        out = [jax.ShapeDtypeStruct((1, batch, heads, rows, size), q.dtype)]
    else:
        out = [jax.ShapeDtypeStruct((tiles.splits, batch, heads, rows, *last), jnp.float32)
               for last in ((size,), (), ())]
    mixed, *sums = pl.pallas_call(
        partial(_kernel, tiles=tiles, softcap=softcap, precision=None if interpret else _precision(q.dtype)),
        out_shape=out, grid=(pl.cdiv(rows, tiles.rows), tiles.splits, heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret, name="attention",
    )(length, jnp.reshape(layer, 1), visible, positions, None if window is None else jnp.reshape(window, 1), scales,
      q.reshape(batch, heads, rows, size), k, v, ck, cv)
    if sums:
        top, total = sums
        share = jnp.exp2(top - top.max(0))
        mixed = _mean((mixed * share[..., None]).sum(0), (total * share).sum(0))
    return mixed.reshape(q.shape).astype(q.dtype)


def _tiles(q, k, ck, splits: int | None) -> _Tiles:
    """The largest sizes whose registers do not spill on sm_80 and sm_90, for arrays as in `attend`.

    Many rows share one read of the keys: several tiles of rows would read them from the second-level cache, which is
    only about twice as fast as memory.
    """
    rows, own, slots, size = q.shape[2] * q.shape[3], k.shape[2], ck.shape[3], pl.next_power_of_2(q.shape[4])
    wide = q.dtype == jnp.float32
    most_rows, elements = (32, 2**12) if wide else (128, 2**14)
    tile = max(min(pl.next_power_of_2(rows), most_rows, elements // size), _SMALLEST)
    # Conversion from a stored type takes registers of its own.
    most_keys, elements = (32 if wide or ck.dtype != q.dtype else 64), (2**12 if wide else 2**13)
    keys = max(min(most_keys, elements // size, 2**19 // (tile * size)), _SMALLEST)
    warps = 8 if tile == 128 or tile * size > 2**13 or wide and size > 128 else 4
    if splits is None:
        programs = q.shape[0] * q.shape[1] * pl.cdiv(rows, tile)
        splits = max(min(_WARPS // (warps * programs), slots // _SPLIT_SLOTS), 1)
    # Where only one program fits on a multiprocessor, it must have more loads under way.
    return _Tiles(tile, keys, max(min(pl.next_power_of_2(own), keys), _SMALLEST), splits, warps,
                  stages=2 if tile in (32, 64) and warps == 4 else 3)


def _mean(mixed, total):
    # A row that sees nothing has no weights.
    return mixed / jnp.where(total > 0, total, 1)[..., None]


def _precision(dtype):
    # Three products of TF32 keep nearly all bits of float32; one, the default, keeps ten.
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if dtype == jnp.float32 else None


def _kernel(length, layer, visible, positions, window, scales, q, k, v, ck, cv, mixed_out, *sums_out,
            tiles, softcap, precision):
    tile, split, h, b = (pl.program_id(axis) for axis in range(4))
    rows, size = q.shape[2:]
    block, own = visible.shape[1:]
    length, layer = length[b], layer[0]
    row = tile * tiles.rows + jnp.arange(tiles.rows)
    t = lax.rem(row, block)
    lane = jnp.arange(pl.next_power_of_2(size))
    lanes = None if size == lane.size else (lane < size)[None]
    dot = partial(jnp.dot, preferred_element_type=jnp.float32, precision=precision)

    def load(ref, *at, mask):
        mask = lanes if mask is None else mask[:, None] if lanes is None else mask[:, None] & lanes
        return plgpu.load(ref.at[*at[:-1], at[-1][:, None], lane[None]], mask=mask, other=None if mask is None else 0)

    def add(carry, keys, values, seen=None, scale=None):
        """One step of the online softmax, in powers of two."""
        top, total, mixed = carry
        x = dot(query, keys.astype(q.dtype).T)
        if scale is not None:
            x = x * scale
        if softcap is not None:   # tanh by one exponential
            x = softcap - 2 * softcap / (1 + jnp.exp2(x * (2 * _LOG2E / softcap)))
        if seen is not None:
            x = jnp.where(seen, x, _MASKED)
        now = jnp.maximum(top, x.max(1) * _LOG2E)
        shrink = jnp.exp2(top - now)
        weights = jnp.exp2(x * _LOG2E - now[:, None])
        mixed = mixed * shrink[:, None] + dot(weights.astype(v.dtype), values.astype(v.dtype))
        return now, total * shrink + weights.sum(1), mixed

    def prefix(index, carry, cut):
        slot = index * tiles.slots + jnp.arange(tiles.slots)
        live = seen = None
        if cut:
            live = slot < length    # slots behind it may hold anything, and 0 * nan is nan
            seen = live[None] if window is None else live[None] & (slot >= since[:, None])
        keys, values = (load(x, layer, b, h, slot, mask=live) for x in (ck, cv))
        return add(carry, keys, values, seen, None if scales is None else scales[0][layer, h])

    def itself(index, carry):
        column = index * tiles.own + jnp.arange(tiles.own)
        real = column < own
        seen = plgpu.load(visible.at[b, t[:, None], column[None]], mask=real[None], other=False)
        keys, values = (load(x, b, h, column, mask=real) for x in (k, v))
        return add(carry, keys, values, seen)

    # Tiles of the cache: [first, last) are read, [front, back) of them need no mask.
    last = pl.cdiv(length, tiles.slots)
    back = lax.div(length, tiles.slots)
    first = front = 0
    if window is not None:
        since = plgpu.load(positions.at[b, t]) - window[0] + 1
        first = jnp.clip(lax.div(since.min(), tiles.slots), 0, last)
        front = pl.cdiv(since.max(), tiles.slots)
    share = pl.cdiv(last - first + pl.cdiv(own, tiles.own), tiles.splits)
    start = first + split * share
    stop = start + share
    low, high = jnp.minimum(start, last), jnp.minimum(stop, last)
    front = jnp.clip(front, low, high)
    back = jnp.clip(back, front, high)

    query = load(q, b, h, row, mask=None if rows % tiles.rows == 0 else row < rows)
    carry = (jnp.full(tiles.rows, _MASKED, jnp.float32), jnp.zeros(tiles.rows, jnp.float32),
             jnp.zeros((tiles.rows, lane.size), jnp.float32))
    carry = lax.fori_loop(front, back, partial(prefix, cut=False), carry)
    carry = lax.fori_loop(0, front - low + high - back, lambda i, carry: prefix(
        jnp.where(i < front - low, low + i, back + i - (front - low)), carry, cut=True), carry)
    if scales is not None:
        carry = (*carry[:2], carry[2] * scales[1][layer, h])
    top, total, mixed = lax.fori_loop(jnp.maximum(start - last, 0), jnp.minimum(stop - last, pl.cdiv(own, tiles.own)),
                                      itself, carry)
    if not sums_out:
        mixed = _mean(mixed, total)
    here = row < rows
    plgpu.store(mixed_out.at[split, b, h, row[:, None], lane[None]], mixed.astype(mixed_out.dtype),
                mask=here[:, None] if lanes is None else here[:, None] & lanes)
    for ref, x in zip(sums_out, (top, total)):
        plgpu.store(ref.at[split, b, h, row], x, mask=here)
