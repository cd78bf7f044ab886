"""A pool of n-grams by their first token.

B sequences, H buckets, G n-grams per key, M tokens per n-gram behind its key.

Of each key the pool keeps the G n-grams that came last; one that comes again moves to the end (Lookahead decoding,
arXiv:2402.02057). Takes 4 * H * (1 + G * M) bytes per sequence. Keys share H buckets: a key takes over the bucket of
another one, and with as many buckets as tokens none ever does.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Pool(NamedTuple):
    """keys [B, H], -1 for a free bucket; grams [B, H, G, M], the latest one last, -1 where there is none."""

    keys: Int[Array, "B H"]
    grams: Int[Array, "B H G M"]


def new(batch: int, buckets: int, entries: int, size: int) -> Pool:
    """An empty pool for `entries` n-grams of `size` tokens behind their key."""
    return Pool(jnp.full((batch, buckets), -1, jnp.int32), jnp.full((batch, buckets, entries, size), -1, jnp.int32))


def insert(pool: Pool, key: Int[Array, "B"], gram: Int[Array, "B M"], there: Bool[Array, "B"]) -> Pool:
    """The pool with one more n-gram in every sequence that is `there`."""
    buckets, entries = pool.grams.shape[1:3]

    def one(keys, grams, key, gram, there):
        bucket = key % buckets
        kept = jnp.where(keys[bucket] == key, grams[bucket], -1)
        same = (kept == gram).all(1)
        gone = jnp.where(same.any(), jnp.argmax(same), 0)                         # itself, or the oldest
        order = jnp.arange(entries)
        kept = kept[jnp.minimum(order + (order >= gone), entries - 1)].at[-1].set(gram)
        bucket = jnp.where(there, bucket, buckets)                                # out of range: dropped
        return keys.at[bucket].set(key, mode="drop"), grams.at[bucket].set(kept, mode="drop")

    return Pool(*jax.vmap(one)(*pool, key, gram, there))


def lookup(pool: Pool, key: Int[Array, "B"]) -> tuple[Int[Array, "B G M"], Bool[Array, "B G"]]:
    """(n-grams behind `key`, the latest first, which of them are there); tokens of those that are not are 0."""
    def one(keys, grams, key):
        bucket = key % keys.shape[0]
        found = grams[bucket][::-1]
        return jnp.maximum(found, 0), (found[:, 0] >= 0) & (keys[bucket] == key)

    return jax.vmap(one)(*pool, key)
