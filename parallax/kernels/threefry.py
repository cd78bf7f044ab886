"""The random numbers of `jax.random` one by one: number i of a key without the others, in operations kernels have.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), counted as
`jax.random` counts in its partitionable form: number i is the hash of (0, i), both words combined.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key, UInt32

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def usable(keys: Key[Array, "..."]) -> bool:
    """Whether `jax.random` draws Gumbel noise of these keys as `gumbel` does."""
    return (jax.random.key_impl(keys) == jax.random.key_impl(jax.random.key(0, impl="threefry2x32"))
            and jax.config.jax_threefry_partitionable and not jax.config.jax_high_dynamic_range_gumbel)


def bits(first: UInt32[Array, "..."], second: UInt32[Array, "..."],
         index: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """`jax.random.bits(key, (n,))[index]` for n above the index; first, second: the two words of the key."""
    words = first, second, first ^ second ^ _PARITY
    x, y = first, index + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(rotation)) | lax.shift_right_logical(y, np.uint32(32 - rotation)))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + np.uint32(group + 1)
    return x ^ y


def gumbel(first: UInt32[Array, "..."], second: UInt32[Array, "..."],
           index: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """`jax.random.gumbel(key, (n,))[index]`, float32. Equal to the bit where the logarithm is."""
    mantissa = lax.shift_right_logical(bits(first, second, index), np.uint32(9))
    uniform = lax.bitcast_convert_type(mantissa | np.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))
