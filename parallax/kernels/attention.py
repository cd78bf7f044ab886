"""Attention of a block over the committed prefix and over itself.

B batch, T block rows, C context rows, L layers, Hkv key/value heads, G query heads per key/value head, D head size,
S slots.

The reference reads the committed part up to the longest sequence only: `lax.switch` over a few prefix sizes, so one
program serves all lengths and an 8192-slot cache that holds 50 tokens costs 128 slots. Both parts share one running
maximum and one division, so their scores are never concatenated. The kernels stop at each sequence's own length.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.kernels.dispatch import Kernels, dispatch, late

if TYPE_CHECKING:                # the models import this module
    from parallax.models.cache import Cache

_MASKED = -1e30
_SMALLEST_BUCKET = 128
_KERNELS = late("attention_tpu", "attend"), late("attention_gpu", "attend")


def attend(q: Float[Array, "B Hkv G T D"], k: Float[Array, "B Hkv CT D"], v: Float[Array, "B Hkv CT D"], cache: Cache,
           layer, *, visible: Bool[Array, "B T CT"], positions: Int[Array, "B T"], key_positions: Int[Array, "B CT"],
           scale: float, softcap: float | None, window, kernels: Kernels = "auto") -> Float[Array, "B Hkv G T D"]:
    """Softmax attention over slots `< cache.length[b]` of layer `layer` and the visible rows of the block.

    Args:
      q, k, v: the block's queries; keys and values of context rows (first) and of the block itself.
      cache: committed keys and values. Capacity 0 means none (training).
      layer: index into the cache; a Python int for unrolled layers, a traced one inside a scan.
      visible: which context and block rows each row sees.
      positions, key_positions: absolute; only a window reads them.
      scale: factor on q·k.
      softcap: `softcap * tanh(score / softcap)`, or None.
      window: keys at least this many positions behind a query are not seen; None means all are. May be traced.
      kernels: which version runs, see `parallax.kernels.dispatch`. Without a cache it is always XLA's, which has a
        gradient.
    """
    q = q * jnp.asarray(scale, q.dtype)
    if window is not None:
        visible = visible & (positions[:, :, None] - key_positions[:, None, :] < window)
        window = jnp.asarray(window, jnp.int32)
    if cache.capacity == 0:
        return _alone(q, k, v, visible, softcap)
    if isinstance(cache.k, tuple):                # unrolled layers: one array each, so the index is theirs
        (ck, cv), layer = (side[layer][None] for side in (cache.k, cache.v)), 0
    else:
        ck, cv = cache.k, cache.v
    xla, tpu, gpu = (partial(version, softcap=softcap) for version in (reference, *_KERNELS))
    return dispatch(kernels, q, k, v, ck, cv, cache.length, layer, visible, positions, window,
                    xla=xla, tpu=tpu, gpu=gpu, out="bh",
                    layouts=("bh", "bh", "bh", "-bh", "-bh", "b", "", "b", "b", ""))


def reference(q, k, v, ck, cv, length, layer, visible, positions, window, scales=None, *, softcap):
    """As the kernels, in XLA's words: ck, cv [L, B, Hkv, S, D]; `visible` has the window of the block's own columns.

    scales: (k, v) factors [L, Hkv] of int8 caches.
    """
    own = jnp.where(visible[:, None, None], _scores(q, k, softcap), _MASKED)
    top = own.max(-1, keepdims=True)

    def prefix(size):
        def part(top):
            kp, vp = (_slots(stored, layer, size) for stored in (ck, cv))
            if scales is not None:
                kp, vp = (x.astype(q.dtype) * factor[layer][:, None, None].astype(q.dtype)
                          for x, factor in zip((kp, vp), scales))
            slot = jnp.arange(size)
            seen = jnp.broadcast_to(slot < length[:, None, None], (q.shape[0], q.shape[3], size))
            if window is not None:
                seen = seen & (positions[:, :, None] - slot < window)
            score = jnp.where(seen[:, None, None], _scores(q, kp, softcap), _MASKED)
            top = jnp.maximum(top, score.max(-1, keepdims=True))
            weights = jnp.exp(score - top)
            return top, weights.sum(-1, keepdims=True), _mix(weights, vp)
        return part

    sizes = buckets(ck.shape[3])
    if len(sizes) == 1:
        top, total, mixed = prefix(sizes[0])(top)
    else:
        index = jnp.searchsorted(np.asarray(sizes, np.int32), length.max())
        top, total, mixed = lax.switch(index, [prefix(size) for size in sizes], top)
    weights = jnp.exp(own - top)
    return ((mixed + _mix(weights, v)) / (total + weights.sum(-1, keepdims=True))).astype(q.dtype)


def _alone(q, k, v, visible, softcap):
    """Attention over the block only."""
    own = jnp.where(visible[:, None, None], _scores(q, k, softcap), _MASKED)
    weights = jnp.exp(own - own.max(-1, keepdims=True))
    return (_mix(weights, v) / weights.sum(-1, keepdims=True)).astype(q.dtype)


def buckets(capacity: int) -> tuple[int, ...]:
    """Prefix sizes that a read may stop at: doubling from 128, the last one the capacity itself."""
    sizes = []
    size = _SMALLEST_BUCKET
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


# G and T are one axis R in both products: XLA's CPU code copies less than with two (10 to 15 % of the whole at T = 1).


def _scores(q, k, softcap):
    score = jnp.einsum("bkrd,bksd->bkrs", _merged(q), k, preferred_element_type=jnp.float32)
    score = score.reshape(*q.shape[:4], k.shape[2])
    return score if softcap is None else softcap * jnp.tanh(score / softcap)


def _mix(weights, v):
    mixed = jnp.einsum("bkrs,bksd->bkrd", _merged(weights).astype(v.dtype), v, preferred_element_type=jnp.float32)
    return mixed.reshape(*weights.shape[:4], v.shape[-1])


def _merged(x):
    """[B, Hkv, G, T, X] -> [B, Hkv, R, X]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _slots(stored, layer, size):
    """The first `size` slots of one layer, [B, Hkv, size, D]."""
    if isinstance(layer, int):
        return stored[layer][:, :, :size]
    start = (layer, 0, 0, 0, 0)
    return lax.dynamic_slice(stored, start, (1, *stored.shape[1:3], size, stored.shape[4]))[0]
