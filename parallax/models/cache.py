"""What a forward reads and returns, and the cache that holds only what is decided.

B batch, T block rows, C context rows, L layers, Hkv key/value heads, D head size, S slots (capacity), K commit rows,
E hidden size, n taps.

The forward never writes the cache. `commit` copies chosen rows of a block behind each sequence's own length, so a
rejected token leaves no trace and a sequence may advance by any count. Slot j of a sequence holds position j.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from parallax.kernels.commit import commit as copy_rows
from parallax.kernels.dispatch import Kernels

PerLayer = tuple[jax.Array, ...]


class Block(NamedTuple):
    """The rows of one forward.

    tokens     [B, T] int32
    positions  [B, T] int32, absolute
    visible    [T, C+T] or [B, T, C+T] bool: which context rows and which rows of the block each row sees, itself
               included; the committed prefix is always seen (up to the model's sliding window)
    embeds     [B, T, E] or None, and soft [B, T] bool: rows that take `embeds` instead of their token
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    visible: Bool[Array, "... T CT"]
    embeds: Float[Array, "B T E"] | None = None
    soft: Bool[Array, "B T"] | None = None


class KV(NamedTuple):
    """Keys and values of uncommitted rows: a block's own, or the `context` of earlier ones. One entry per layer.

    k, v       L arrays [B, T, Hkv, D]
    positions  [B, T], for sliding windows
    """

    k: PerLayer
    v: PerLayer
    positions: Int[Array, "B T"]


class Output(NamedTuple):
    """hidden [B, T, E] and taps [B, T, n, E]: residual stream, before the final norm; kv: the block's own."""

    hidden: Float[Array, "B T E"]
    taps: Float[Array, "B T n E"]
    kv: KV


class Cache(NamedTuple):
    """k, v: [L, B, Hkv, S, D] (scanned) or L arrays [B, Hkv, S, D] (unrolled); length [B] committed positions."""

    k: jax.Array | PerLayer
    v: jax.Array | PerLayer
    length: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        """Slots per sequence, S."""
        return jax.tree.leaves(self.k)[0].shape[-2]


def commit(cache: Cache, kv: KV, rows: Int[Array, "B K"], count: Int[Array, "B"], kernels: Kernels = "xla") -> Cache:
    """Copies rows `rows[b, :count[b]]` of the block behind sequence b's length and advances it by `count[b]`.

    Rows past the count are copied too but stay behind the new length, where nothing reads them. That needs room: the
    capacity must be at least the longest final length plus K, or else the copy moves forward, over committed slots.

    Args:
      kernels: which version of the copy runs, see `parallax.kernels.dispatch`; a decoder passes its model's.

    Raises:
      ValueError: the block has another number of layers than the cache, or the cache has fewer than K slots.
    """
    if len(kv.k) != len(cache.k):
        raise ValueError(f"cannot commit keys and values of {len(kv.k)} layers to a cache of {len(cache.k)}")
    if rows.shape[1] > cache.capacity:
        raise ValueError(f"cannot commit {rows.shape[1]} rows to a cache of {cache.capacity} slots")
    written = copy_rows((cache.k, cache.v), (kv.k, kv.v), rows, cache.length, kernels)
    return Cache(*written, cache.length + count)


def truncate(cache: Cache, length: Int[Array, "B"]) -> Cache:
    """Forgets all positions from `length[b]` on. For drafters, which may commit ahead; the target never needs it."""
    return cache._replace(length=jnp.minimum(cache.length, length))
