"""The Triton attention kernel, interpreted, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.compile import gpu
from parallax.kernels import attention_gpu

# Largest absolute error with queries, keys and values of variance 1. bfloat16 rounds weights and the result to 8 bits.
BOUNDS = {"float32": 5e-6, "bfloat16": 2e-2}
MASKS = ("random", "tree", "causal", "full")


def case(seed, *, lengths, heads=1, group=2, block=4, context=0, size=64, slots=200, layers=2, layer=1, mask="random",
         window=None, dtype="float32", int8=False):
    """Arguments of `attend`. Slots behind a length, and all other layers, are NaN (127 in int8)."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q = normal(batch, heads, group, block, size) / np.sqrt(size)
    k, v = (normal(batch, heads, context + block, size) for _ in range(2))
    stored = [normal(layers, batch, heads, slots, size) for _ in range(2)]
    scales = None
    if int8:
        stored = [np.clip(np.round(x * 40), -127, 127) for x in stored]
        scales = tuple(jnp.asarray(rng.uniform(0.01, 0.05, (layers, heads)), jnp.float32) for _ in range(2))
    for x in stored:
        unused = np.arange(slots) >= np.asarray(lengths)[:, None, None]
        x[:] = np.where((np.arange(layers) == layer)[:, None, None, None, None], x, np.nan)
        x[layer] = np.where(unused[..., None], np.nan, x[layer])
    if int8:
        stored = [np.nan_to_num(x, nan=127) for x in stored]
    positions = np.asarray(lengths)[:, None] + np.arange(block)
    own = np.stack([seen(rng, mask, block) for _ in range(batch)])
    visible = np.concatenate([rng.random((batch, block, context)) < 0.7, own], 2)
    return dict(
        q=jnp.asarray(q, dtype), k=jnp.asarray(k, dtype), v=jnp.asarray(v, dtype),
        ck=jnp.asarray(stored[0], "int8" if int8 else dtype), cv=jnp.asarray(stored[1], "int8" if int8 else dtype),
        length=jnp.asarray(lengths, jnp.int32), layer=jnp.int32(layer), visible=jnp.asarray(visible),
        positions=jnp.asarray(positions, jnp.int32), window=None if window is None else jnp.int32(window),
        scales=scales)


def seen(rng, mask, block):
    if mask == "full":
        return np.ones((block, block), bool)
    if mask == "causal":
        return np.tri(block, dtype=bool)
    own = np.eye(block, dtype=bool)
    if mask == "random":
        return own | (rng.random((block, block)) < 0.5)
    for row in range(1, block):
        own[row] |= own[rng.integers(row)]
    return own


def exact(*, q, k, v, ck, cv, length, layer, visible, positions, window, scales, softcap):
    """The same in float64, one sequence and head at a time, from the scores of all keys at once."""
    q, k, v, ck, cv = (np.asarray(x, np.float64) for x in (q, k, v, ck, cv))
    out = np.empty(q.shape)
    for b, h in np.ndindex(q.shape[:2]):
        before = np.arange(int(length[b]))
        factors = (1, 1) if scales is None else (float(x[layer, h]) for x in scales)
        keys, values = (np.concatenate([x[layer, b, h, before] * factor, own[b, h]])
                        for x, factor, own in zip((ck, cv), factors, (k, v)))
        near = np.ones((q.shape[3], len(before)), bool)
        if window is not None:
            near = np.asarray(positions)[b][:, None] - before < int(window)
        score = q[b, h] @ keys.T
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        weights = np.where(np.concatenate([near, np.asarray(visible)[b]], 1),
                           np.exp(score - score.max(-1, keepdims=True)), 0)
        out[b, h] = weights @ values / weights.sum(-1, keepdims=True)
    return out


@functools.partial(jax.jit, static_argnames=("softcap", "splits"))
def run(inputs, softcap=None, splits=None):
    return attention_gpu.attend(**inputs, softcap=softcap, splits=splits, interpret=True)


def error(inputs, softcap=None, splits=None):
    got = run(inputs, softcap, splits)
    assert got.dtype == inputs["q"].dtype
    return np.abs(np.asarray(got, np.float64) - exact(**inputs, softcap=softcap)).max()


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 99), lengths=st.lists(st.integers(0, 300), min_size=1, max_size=2),
       heads=st.integers(1, 2), group=st.integers(1, 8), block=st.integers(1, 64), context=st.sampled_from([0, 5]),
       size=st.sampled_from([64, 80, 96, 128, 256]),
       layer=st.integers(0, 1), mask=st.sampled_from(MASKS), window=st.sampled_from([None, 1, 50, 400]),
       softcap=st.sampled_from([None, 5.0]), dtype=st.sampled_from(sorted(BOUNDS)), int8=st.booleans(),
       splits=st.sampled_from([None, 2]))
def test_random_shapes_equal_float64(seed, lengths, dtype, softcap, splits, **options):
    inputs = case(seed, lengths=lengths, slots=300, dtype=dtype, **options)
    assert error(inputs, softcap, splits) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype, int8, window", [
    ("float32", False, None), ("float32", False, 40), ("bfloat16", False, None), ("bfloat16", True, 40)])
def test_lengths_on_and_off_the_borders_of_tiles_equal_float64(dtype, int8, window):
    inputs = case(1, lengths=[0, 1, 63, 64, 65, 128, 199, 200], dtype=dtype, int8=int8, window=window)
    assert error(inputs) < BOUNDS[dtype]


@pytest.mark.parametrize("block, group", [(1, 1), (64, 3)])
def test_smallest_and_largest_blocks_equal_float64(block, group):
    inputs = case(2, lengths=[70, 130], block=block, group=group, heads=2, mask="tree")
    assert error(inputs) < BOUNDS["float32"]


@pytest.mark.parametrize("splits", [1, 5])
def test_the_number_of_splits_does_not_change_the_result(splits):
    inputs = case(3, lengths=[0, 5, 200, 450], slots=450, block=9, context=70, window=260)
    assert error(inputs, splits=splits) < BOUNDS["float32"]


def test_a_softcap_bounds_large_scores():
    inputs = case(4, lengths=[100])
    inputs["q"] = inputs["q"] * 40
    assert error(inputs, softcap=3.0) < BOUNDS["float32"]
    assert np.abs(exact(**inputs, softcap=3.0) - exact(**inputs, softcap=None)).max() > 0.1


def test_a_row_that_sees_nothing_is_finite():
    inputs = case(5, lengths=[0, 90], window=3)
    inputs["positions"] = inputs["positions"] + 500
    inputs["visible"] = inputs["visible"].at[:, 1].set(False)
    for splits in (1, 2):
        assert np.isfinite(run(inputs, splits=splits)).all()


def test_splits_fill_the_gpu_only_where_heads_and_rows_do_not():
    def splits(heads, block=1, slots=8192):
        q, k, ck = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (
            (1, heads, 4, block, 128), (1, heads, block, 128), (2, 1, heads, slots, 128)))
        return attention_gpu._tiles(q, k, ck, None).splits

    assert splits(8) == 32 and splits(32) == 8 and splits(264) == 1 and splits(1000) == 1
    assert splits(8, block=64) == 8
    assert splits(8, slots=512) == 2 and splits(8, slots=100) == 1


@pytest.mark.aot
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_it_compiles_without_spills(block, size):
    def shape(dtype, *dimensions):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    kernels = gpu.compiled(
        functools.partial(attention_gpu.attend, softcap=None), shape("bfloat16", 1, 8, 4, block, size),
        *[shape("bfloat16", 1, 8, block, size)] * 2, *[shape("bfloat16", 2, 1, 8, 4096, size)] * 2,
        shape("int32", 1), shape("int32"), shape("bool", 1, block, block), shape("int32", 1, block))
    assert [(kernel.arch, kernel.spills, kernel.reason) for kernel in kernels] == [
        ("sm_80", 0, None), ("sm_90", 0, None)]
