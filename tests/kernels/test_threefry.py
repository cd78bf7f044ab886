"""The random numbers of kernels are those of `jax.random`, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.kernels import threefry

SIZES = (1, 37, 4097)


@jax.jit
def ours(keys, index):
    words = jax.random.key_data(keys)
    return [f(words[:, :1], words[:, 1:], index[None]) for f in (threefry.bits, threefry.gumbel)]


def keys():
    """Of all kinds: plain, folded, split, with words of ones."""
    plain = jnp.stack([jax.random.key(seed) for seed in (0, 1, 2**31 - 1)])
    folded = jax.vmap(jax.random.fold_in, (0, None))(plain, 2**31 + 5)
    extreme = jax.random.wrap_key_data(jnp.full((1, 2), 2**32 - 1, jnp.uint32))
    return jnp.concatenate([plain, folded, jax.random.split(plain[1], 3), extreme])


@pytest.mark.parametrize("size", SIZES)
def test_bits_and_gumbel_noise_are_those_of_jax(size):
    bits, gumbel = ours(keys(), jnp.arange(size, dtype=jnp.uint32))
    np.testing.assert_array_equal(bits, jax.vmap(lambda key: jax.random.bits(key, (size,)))(keys()))
    np.testing.assert_array_equal(gumbel, jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys()))


def test_any_part_is_that_of_the_whole():
    whole = jax.vmap(lambda key: jax.random.gumbel(key, (200_000,)))(keys())
    for start in (0, 1, 4096, 151_936 - 700, 199_300):
        part = ours(keys(), jnp.arange(start, start + 700, dtype=jnp.uint32))[1]
        np.testing.assert_array_equal(part, whole[:, start:start + 700])


def test_a_generator_that_counts_or_hashes_otherwise_is_not_usable():
    assert threefry.usable(jax.random.key(0)) and threefry.usable(keys())
    assert not threefry.usable(jax.random.key(0, impl="rbg"))
    for flag in ({"jax_threefry_partitionable": False}, {"jax_high_dynamic_range_gumbel": True}):
        (name, value), before = *flag.items(), getattr(jax.config, *flag)
        jax.config.update(name, value)
        try:
            assert not threefry.usable(jax.random.key(0))
        finally:
            jax.config.update(name, before)
