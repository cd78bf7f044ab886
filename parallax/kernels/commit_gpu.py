"""Rows into the cache in place, on GPU (Triton).

L layers, B batch, T block rows, Hkv key/value heads, D head size, S slots, K rows to copy. One program copies the
rows of one head: reads them where `rows` points, writes them behind the length, of all arrays.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

_TILE = 4096   # elements that a program holds at once, of all arrays: many loads on their way, and registers enough


def commit(stored: tuple[jax.Array, ...], new: tuple[jax.Array, ...], rows: Int[Array, "B K"],
           start: Int[Array, "B"], *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Copies row `rows[b, i]` of the block to slot `start[b] + i` of sequence b; nothing else changes.

    Args:
      stored: caches [L, B, Hkv, S, D] of one shape and type, written in place.
      new: for each of them the block's rows, [L, B, T, Hkv, D].
      rows: below T.
      start: at most S - K.
    """
    layers, batch, heads, _, size = stored[0].shape
    sides, lanes = len(stored), pl.next_power_of_2(size)
    tile = min(pl.next_power_of_2(rows.shape[1]), max(1, _TILE // (lanes * pl.next_power_of_2(sides))))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return tuple(pl.pallas_call(
        partial(_kernel, tile=tile, lanes=lanes),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored],
        grid=(layers * batch, heads, pl.cdiv(rows.shape[1], tile)),
        in_specs=[whole] * (2 + 2 * sides), out_specs=[whole] * sides,
        input_output_aliases={2 + side: side for side in range(sides)},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="commit",
    )(rows, start, *stored, *(x.astype(stored[0].dtype) for x in new)))


def _kernel(rows_ref, start_ref, *refs, tile, lanes):
    sides = len(refs) // 3
    batch, count = rows_ref.shape
    layer, b, head = pl.program_id(0) // batch, pl.program_id(0) % batch, pl.program_id(1)
    k = pl.program_id(2) * tile + jnp.arange(tile)
    lane = jnp.arange(lanes)
    taken, slot = k < count, start_ref[b] + k
    row = plgpu.load(rows_ref.at[b, k], mask=taken, other=0)
    together = max(1, _TILE // (tile * lanes))
    here = taken[:, None] & (lane < refs[0].shape[-1])
    for at in range(0, sides, together):
        group = slice(at, at + together)
        values = [plgpu.load(new.at[layer, b, row[:, None], head, lane[None]], mask=here)
                  for new in refs[sides:2 * sides][group]]
        for out, value in zip(refs[2 * sides:][group], values):
            plgpu.store(out.at[layer, b, head, slot[:, None], lane[None]], value, mask=here)
