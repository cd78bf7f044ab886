"""Rows into the cache through the kernels: every bit as the reference, and nothing else changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.kernels import commit_gpu, commit_tpu
from parallax.kernels.commit import _with, reference

# layers, sequences, block rows, rows to copy, heads, head size, slots; where the rows go; types
CASES = {
    "a row in front": ((2, 1, 3, 1, 2, 8, 32), [0], "float32"),
    "across a window": ((2, 3, 5, 4, 2, 8, 40), [7, 8, 30], "float32"),
    "more than a window": ((1, 2, 12, 11, 1, 16, 48), [5, 16], "float32"),
    "up to the last slot": ((1, 2, 4, 4, 2, 8, 29), [25, 3], "float32"),
    "beyond the last slot": ((1, 2, 4, 4, 2, 8, 29), [28, 27], "float32"),
    "half words": ((2, 2, 5, 5, 3, 8, 48), [15, 1], "bfloat16"),
    "bytes": ((1, 2, 5, 3, 3, 8, 64), [30, 5], "int8"),
}


def _bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


@pytest.mark.parametrize("form", ["stacked", "per layer"])
@pytest.mark.parametrize("kernel", [commit_tpu.commit, commit_gpu.commit], ids=["tpu", "gpu"])
@pytest.mark.parametrize("shape, length, dtype", CASES.values(), ids=CASES)
def test_the_cache_is_that_of_the_reference_to_the_bit(shape, length, dtype, kernel, form):
    layers, batch, width, count, heads, size, slots = shape
    random = np.random.default_rng(sum(shape))

    def draw(*shape):
        values = jnp.asarray(random.integers(-100, 100, shape) if dtype == "int8" else random.normal(size=shape))
        return values.astype(dtype)

    stored = tuple(draw(layers, batch, heads, slots, size) for _ in range(2))
    if form == "per layer":
        stored = tuple(map(tuple, stored))
    rows = jnp.asarray(random.integers(0, width, (batch, count)), jnp.int32)      # repeated, in any order
    untaken = ~(np.arange(width)[None] == np.asarray(rows)[..., None]).any(1)     # [B, T]
    new = tuple(tuple(draw(batch, width, heads, size) for _ in range(layers)) for _ in range(2))
    if dtype != "int8":                                                          # what is not taken cannot spoil it
        new = jax.tree.map(lambda x: jnp.where(untaken[:, :, None, None], jnp.nan, x), new)
    length = jnp.asarray(length, jnp.int32)
    wanted = jax.jit(reference)(stored, new, rows, length)
    ours = jax.jit(partial(_with, partial(kernel, interpret=True)))(stored, new, rows, length)
    assert jax.tree.structure(ours) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted)):
        np.testing.assert_array_equal(_bits(one), _bits(other))
    assert any((_bits(one) != _bits(old)).any() for one, old in zip(jax.tree.leaves(ours), jax.tree.leaves(stored)))
