"""Rows into the cache in place, on TPU.

L layers, B batch, T block rows, Hkv key/value heads, D head size, S slots, K rows to copy.

Memory holds a cache in tiles of eight slots, so one slot cannot be written alone: the kernel reads the windows of
eight slots that the new rows fall into, of many layers and heads at once, replaces what is new and writes them back,
each window once. Rows move as 32-bit words, so nothing is rounded and a row that is not taken cannot spoil another.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

_LANES = 128
_BUDGET = 8 << 20   # bytes of VMEM for the blocks of a grid step, each held twice: one in use, one on its way
_HEADS = 128        # of all arrays of a call and of one layer: their code is straight-line, and takes time to compile
_ROWS = 128         # of a block that are read at once, where the whole block does not fit


def commit(stored: tuple[jax.Array, ...], new: tuple[jax.Array, ...], rows: Int[Array, "B K"],
           start: Int[Array, "B"], *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Copies row `rows[b, i]` of the block to slot `start[b] + i` of sequence b; nothing else changes.

    Args:
      stored: caches [L, B, Hkv, S, D] of one shape and type, written in place.
      new: for each of them the block's rows, [L, B, T, Hkv, D].
      rows: below T.
      start: at most S - K.
      interpret: True, or `pltpu.InterpretParams()` for 32-bit caches, runs it without a TPU.
    """
    like, width, count = stored[0], new[0].shape[2], rows.shape[1]
    row = pl.cdiv(like.shape[4], _LANES) * _LANES * like.dtype.itemsize
    fit = _BUDGET // (2 * (2 * _window(like.dtype) + width) * row)   # heads of one layer of one array in a grid step
    if fit < min(like.shape[2], 8) and width > _ROWS:
        for at in range(0, count, _ROWS):
            part = rows[:, at:at + _ROWS]
            block = tuple(jnp.take_along_axis(x, part[None, :, :, None, None], 2) for x in new)
            part = jnp.broadcast_to(jnp.arange(part.shape[1]), part.shape)
            stored = commit(stored, block, part, start + at, interpret=interpret)
        return stored
    heads = like.shape[2] if like.shape[2] <= max(fit, 8) else max(fit // 8, 1) * 8
    arrays = max(1, min(_HEADS, fit) // heads)
    layers = min(like.shape[0], max(1, fit // (heads * min(arrays, len(stored)))))
    call = partial(_call, rows, start, layers=layers, heads=heads, interpret=interpret)
    return tuple(written for at in range(0, len(stored), arrays)
                 for written in call(stored[at:at + arrays], new[at:at + arrays]))


def _window(dtype):
    """Slots of a tile in memory."""
    return 32 if dtype.itemsize == 1 else 8


# Jitted, so that the groups of arrays, which are alike, are traced once.
@partial(jax.jit, static_argnames=("layers", "heads", "interpret"))
def _call(rows, start, stored, new, *, layers, heads, interpret):
    like, sides, count, wide = stored[0], len(stored), rows.shape[1], _window(stored[0].dtype)
    steps = (count + wide - 2) // wide + 1
    # As many heads as fill 32-bit words, and 32-bit types as integers.
    spare = -like.shape[2] % (4 // like.dtype.itemsize)
    new = tuple(jnp.pad(x.astype(like.dtype), ((0, 0),) * 3 + ((0, spare), (0, 0))) for x in new)
    if like.dtype.itemsize == 4:
        new = tuple(lax.bitcast_convert_type(x, jnp.int32) for x in new)
    place = jax.ShapeDtypeStruct
    if not interpret:
        # Else XLA may move the whole cache to VMEM and back: it takes the kernel for one that reads all of it.
        place = pltpu.HBM
        stored = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in stored)

    def window(layer, head, b, i, start, rows):
        last = lax.div(start[b] + count - 1, wide)
        return layer, b, head, jnp.minimum(lax.div(start[b], wide) + i, last), 0

    windows = pl.BlockSpec((layers, 1, heads, wide, like.shape[4]), window)
    width, padded = new[0].shape[2:4]
    blocks = pl.BlockSpec((layers, 1, width, padded if heads == like.shape[2] else heads, like.shape[4]),
                          lambda layer, head, b, i, *_: (layer, b, 0, head, 0))
    moved = (2 * steps * wide * like.size // like.shape[3] + new[0].size) * like.dtype.itemsize
    written = pl.pallas_call(
        partial(_kernel, count=count),
        out_shape=[place(like.shape, like.dtype)] * sides,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(like.shape[0], layers), pl.cdiv(like.shape[2], heads), like.shape[1], steps),
            in_specs=[windows] * sides + [blocks] * sides, out_specs=[windows] * sides),
        input_output_aliases={2 + side: side for side in range(sides)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=sides * moved),
        interpret=interpret,
        name="commit",
    )(start, rows.reshape(-1), *stored, *new)
    # XLA refuses a result with a place of its own that is also the program's result.
    return written if interpret else lax.optimization_barrier(written)


def _kernel(start_ref, rows_ref, *refs, count):
    sides = len(refs) // 3
    b, i = pl.program_id(2), pl.program_id(3)
    start, wide = start_ref[b], _window(refs[0].dtype)
    first = (lax.div(start, wide) + i) * wide                        # slot of the window
    taken = min(count, wide)
    skip = jnp.clip(first - start, 0, count - taken)                 # rows in front of those that may fall into it
    packing = 4 // refs[0].dtype.itemsize                            # slots of a 32-bit word
    bits, shift = 32 // packing, packing.bit_length() - 1

    # Windows behind the last row: the block stays that of the last window, which is written when it leaves.
    @pl.when(first < start + count)
    def _():
        word = lax.broadcasted_iota(jnp.int32, (wide // packing, 1), 0)
        ones = jnp.uint32(2**bits - 1).astype(jnp.int32)
        kept, moves = jnp.full_like(word, -1), []
        for k in range(taken):
            row, slot = rows_ref[b * count + skip + k], start + skip + k - first
            place = slot & packing - 1
            field = jnp.where(word == slot >> shift, ones << place * bits, 0)
            kept = kept & ~field
            # Head h lies in the field h % packing of its word, and is wanted in the field `place`.
            turns = [(jnp.maximum(place - at, 0) * bits, jnp.maximum(at - place, 0) * bits) for at in range(packing)]
            moves.append((row, field, turns))

        for old, new, out in zip(refs[:sides], refs[sides:2 * sides], refs[2 * sides:]):
            words = new if packing == 1 else new.bitcast(jnp.int32)

            @pl.loop(0, old.shape[0])
            def _(layer):
                for head in range(old.shape[2]):
                    value = pltpu.bitcast(old[layer, 0, head], jnp.int32) & kept
                    for row, field, turns in moves:
                        there = words[layer, 0, row, pl.ds(head // packing, 1), :]
                        if packing > 1:
                            up, down = turns[head % packing]
                            there = lax.shift_right_logical(there << up, down)
                        value = value | there & field
                    out[layer, 0, head] = pltpu.bitcast(value, out.dtype)
