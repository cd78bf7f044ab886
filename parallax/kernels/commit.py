"""Chosen rows of a block into the cache.

L layers, B batch, T block rows, Hkv key/value heads, D head size, S slots, K rows to copy.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from parallax.kernels.dispatch import Kernels, dispatch, late

Stored = jax.Array | tuple[jax.Array, ...]


def commit(stored: tuple[Stored, ...], new: tuple[tuple[jax.Array, ...], ...], rows: Int[Array, "B K"],
           length: Int[Array, "B"], kernels: Kernels = "auto") -> tuple[Stored, ...]:
    """Row `rows[b, i]` of the block becomes slot `length[b] + i` of sequence b; no other slot changes.

    Where the rows would reach behind slot S they are moved forward until the last one is in it, as
    `dynamic_update_slice` does.

    Args:
      stored: keys and values, each one array [L, B, Hkv, S, D] or L arrays [B, Hkv, S, D].
      new: for each of them L arrays [B, T, Hkv, D].
      kernels: which version runs, see `parallax.kernels.dispatch`.
    """
    slots = "bh" if isinstance(stored[0], tuple) else "-bh"
    gpu = partial(_with, late("commit_gpu", "commit"))
    return dispatch(kernels, stored, new, rows, length, xla=reference, tpu=_on_tpu, gpu=gpu,
                    layouts=(slots, "b-h", "b", "b"), out=slots)


def reference(stored, new, rows, length):
    """As the kernels, in XLA's words.

    One slice update per sequence in a Python loop is the only form that stays in place on CPU and TPU alike; a
    scatter or a vmapped update copies the whole cache.
    """
    batch = rows.shape[0]

    def chosen(block, b):                                     # [B, T, Hkv, D] -> [Hkv, K, D]
        return block[b][rows[b]].swapaxes(0, 1)

    def write(side, blocks):
        if isinstance(side, tuple):
            out = []
            for layer, block in zip(side, blocks):
                for b in range(batch):
                    layer = lax.dynamic_update_slice(layer, chosen(block, b)[None].astype(layer.dtype),
                                                     (b, 0, length[b], 0))
                out.append(layer)
            return tuple(out)
        for b in range(batch):
            update = jnp.stack([chosen(block, b) for block in blocks])[:, None].astype(side.dtype)
            side = lax.dynamic_update_slice(side, update, (0, b, 0, length[b], 0))
        return side

    return tuple(map(write, stored, new))


def _on_tpu(stored, new, rows, length, *, interpret=False):
    """The kernel writes whole slots, which a cache with its slots in the lanes does not have: that is left to XLA."""
    from parallax.kernels import attention_tpu, commit_tpu  # late, see `dispatch.late`
    if attention_tpu.slots_last(*jax.tree.leaves(stored)[0].shape[-2:]):
        return reference(stored, new, rows, length)
    return _with(commit_tpu.commit, stored, new, rows, length, interpret=interpret)


def _with(kernel, stored, new, rows, length, **options):
    """Through a kernel, which takes any number of arrays [L, B, Hkv, S, D] and [L, B, T, Hkv, D]: two, or 2 L of one
    layer."""
    layers = None
    if isinstance(stored[0], tuple):
        layers = len(stored[0])
        stored, new = ([layer[None] for side in sides for layer in side] for sides in (stored, new))
    else:
        new = map(jnp.stack, new)
    stored, new = tuple(stored), tuple(new)
    start = jnp.clip(length, 0, stored[0].shape[3] - rows.shape[1])
    # Rows past the count may be anything, and nobody but XLA keeps a read inside its array.
    written = kernel(stored, new, jnp.clip(rows, 0, new[0].shape[2] - 1), start, **options)
    if layers is None:
        return written
    return tuple(tuple(layer[0] for layer in written[at:at + layers]) for at in range(0, len(written), layers))
