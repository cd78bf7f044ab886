"""The TPU kernel for attention, interpreted, against float64 numpy.

B batch, Hkv key/value heads, G query heads of each, T block rows, C context rows, D head size, S slots, L layers.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from parallax.kernels import attention, attention_tpu

# Largest error as a multiple of the largest value: float32 sums, and the rounding of weights and result to bfloat16.
BOUND = {"float32": 2e-6, "bfloat16": 2**-8}
MASKS = ("random", "tree", "causal", "full")


def mask(random, kind, batch, block, context):
    """[B, T, C + T]: a row sees itself, and its block as `kind` says; context at random."""
    own = np.zeros((batch, block, block), bool)
    for b in range(batch):
        if kind == "random":
            own[b] = random.random((block, block)) < 0.4
        elif kind == "causal":
            own[b] = np.tri(block, dtype=bool)
        elif kind == "full":
            own[b] = True
        else:
            for t in range(1, block):
                parent = random.integers(t)
                own[b, t] = own[b, parent]
                own[b, t, parent] = True
        own[b] |= np.eye(block, dtype=bool)
    return np.concatenate([random.random((batch, block, context)) < 0.5, own], 2)


def case(seed=0, *, heads=2, group=2, block=4, context=0, size=64, slots=300, layers=2, lengths=(300, 17), kind="tree",
         window=None, softcap=None, dtype="float32", int8=False):
    """Arguments of `attend`, with nan wherever nothing may look: behind the length and in other layers."""
    random = np.random.default_rng(seed)
    batch = len(lengths)
    q = jnp.asarray(random.normal(size=(batch, heads, group, block, size)) / size**0.5, dtype)
    k, v = (jnp.asarray(random.normal(size=(batch, heads, context + block, size)), dtype) for _ in "kv")
    layer = random.integers(layers)
    shape = (layers, batch, heads, slots, size)
    scales = None
    if int8:
        ck, cv = (jnp.asarray(random.integers(-127, 128, shape), jnp.int8) for _ in "kv")
        scales = tuple(jnp.asarray(random.uniform(0.005, 0.02, (layers, heads)), jnp.float32) for _ in "kv")
    else:
        live = (np.arange(slots) < np.reshape(lengths, (-1, 1)))[:, None, :, None]
        live = live & (np.arange(layers) == layer)[:, None, None, None, None]
        ck, cv = (jnp.asarray(np.where(live, random.normal(size=shape), np.nan), dtype) for _ in "kv")
    positions = np.reshape(lengths, (-1, 1)) + np.sort(random.integers(0, block, (batch, block)))
    arrays = (q, k, v, ck, cv, jnp.asarray(lengths, jnp.int32), jnp.int32(layer),
              jnp.asarray(mask(random, kind, batch, block, context)), jnp.asarray(positions, jnp.int32),
              None if window is None else jnp.int32(window), scales)
    return SimpleNamespace(arrays=arrays, softcap=softcap, dtype=dtype)


def expected(case):
    """(result, largest value), in float64 and with all scores at once."""
    q, k, v, ck, cv, length, layer, visible, positions, window, scales = case.arrays
    q, k, v, ck, cv = (np.asarray(x, np.float64) for x in (q, k, v, ck[layer], cv[layer]))
    if scales is not None:
        ck, cv = (x * np.asarray(factor, np.float64)[layer][:, None, None] for x, factor in zip((ck, cv), scales))
    slot = np.arange(ck.shape[2])
    live = slot < np.asarray(length)[:, None]
    ck, cv = (np.where(live[:, None, :, None], x, 0) for x in (ck, cv))
    seen = np.broadcast_to(live[:, None], (*visible.shape[:2], slot.size))
    if window is not None:
        seen = seen & (np.asarray(positions)[:, :, None] - slot < int(window))
    keys, values = np.concatenate([ck, k], 2), np.concatenate([cv, v], 2)
    score = np.einsum("bhgtd,bhsd->bhgts", q, keys)
    if case.softcap is not None:
        score = case.softcap * np.tanh(score / case.softcap)
    score = np.where(np.concatenate([seen, visible], 2)[:, None, None], score, -np.inf)
    weights = np.exp(score - score.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhgts,bhsd->bhgtd", weights, values), np.abs(values).max()


def attend(case, interpret=True):
    kernel = partial(attention_tpu.attend, softcap=case.softcap, interpret=interpret)
    result = jax.jit(kernel)(*case.arrays)
    assert result.dtype == case.dtype
    return np.asarray(result, np.float64)


def check(case, interpret=True):
    want, largest = expected(case)
    np.testing.assert_allclose(attend(case, interpret), want, rtol=0, atol=BOUND[case.dtype] * largest)


@st.composite
def shapes(draw):
    slots = draw(st.integers(1, 600))
    return dict(
        seed=draw(st.integers(0, 99)), heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 8)),
        block=draw(st.sampled_from([1, 2, 5, 16, 33, 64])), context=draw(st.integers(0, 3)),
        size=draw(st.sampled_from([64, 80, 128, 192, 256])), slots=slots, layers=draw(st.integers(1, 3)),
        lengths=draw(st.lists(st.one_of(st.sampled_from([0, min(1, slots), min(256, slots), slots]),
                                        st.integers(0, slots)), min_size=1, max_size=3)),
        kind=draw(st.sampled_from(MASKS)), window=draw(st.none() | st.integers(1, 400)),
        softcap=draw(st.none() | st.floats(0.5, 30)), dtype=draw(st.sampled_from(sorted(BOUND))),
        int8=draw(st.booleans()))


@settings(max_examples=6, derandomize=True, deadline=None, database=None)
@given(shapes())
def test_any_shape_agrees_with_float64(shape):
    check(case(**shape))


@pytest.mark.parametrize("options", [
    dict(size=128, slots=700, lengths=(700, 0, 256), kind="causal", context=3),
    dict(size=64, slots=640, lengths=(640, 1, 513), kind="random"),
    dict(slots=700, size=128, lengths=(700, 90), window=130, kind="full", softcap=3.0),
    dict(slots=700, size=128, lengths=(511, 700), window=600, dtype="bfloat16", group=4),
    dict(slots=640, size=128, lengths=(640, 300), int8=True, softcap=5.0),
    dict(slots=600, lengths=(600,), heads=4, int8=True, dtype="bfloat16", block=1, window=450),
], ids=["lengths", "slots-in-lanes", "window", "wide-window", "int8", "one-row"])
def test_each_feature_agrees_with_float64_over_several_blocks(options, monkeypatch):
    monkeypatch.setattr(attention_tpu, "_STEP_BYTES", 1)       # blocks of 256 slots
    monkeypatch.setattr(attention_tpu, "_UPDATE", 128)         # and several updates in each
    check(case(**options))


def test_it_agrees_with_the_reference():
    arguments = case(slots=200, lengths=(200, 0, 77), layers=3, window=150, softcap=4.0)
    q, k, v, ck, cv, *rest = arguments.arrays
    arguments.arrays = (q, k, v, jnp.nan_to_num(ck), jnp.nan_to_num(cv), *rest)
    want = jax.jit(partial(attention.reference, softcap=4.0))(*arguments.arrays)
    np.testing.assert_allclose(attend(arguments), np.asarray(want, np.float64), rtol=0, atol=2e-6)


def test_a_simulated_tpu_agrees():
    check(case(slots=600, lengths=(0, 600, 300), window=500), pltpu.InterpretParams())


@pytest.mark.parametrize("lengths", [(0,), (90,)])
def test_a_row_that_sees_nothing_is_finite(lengths):
    arguments = case(slots=128, lengths=lengths, window=5)
    visible = arguments.arrays[7]
    positions = arguments.arrays[8] + 1000
    arguments.arrays = (*arguments.arrays[:7], jnp.zeros_like(visible), positions, *arguments.arrays[9:])
    assert np.isfinite(attend(arguments)).all()


@pytest.mark.parametrize("batch, heads, rows, slots, size, itemsize", [
    (1, 8, 64, 8192, 128, 2), (4, 8, 64, 8192, 128, 2), (4, 8, 256, 8192, 128, 2), (2, 1, 1024, 8192, 256, 4),
    (1, 1, 1, 17, 64, 1), (3, 5, 7, 384, 80, 2), (1, 2, 4096, 4096, 128, 2)])
def test_tiles_divide_what_they_tile_and_stay_small(batch, heads, rows, slots, size, itemsize):
    together, step = attention_tpu._tiles(batch, heads, rows, slots, size, itemsize)
    assert heads % together == 0 and (batch > 1 or heads == 1 or together < heads)
    assert step % 128 == 0 and step <= max(slots, 128) and step % min(step, attention_tpu._UPDATE) == 0
    assert step == 128 or step == 256 or 2 * together * step * size * itemsize <= attention_tpu._STEP_BYTES
    assert together == 1 or together * rows <= attention_tpu._STEP_ROWS


# What XLA chooses for [2, 2, 8, S, D] on v5e and v6e; for S below 128 it may also put the heads next to the lanes.
@pytest.mark.parametrize("slots, size, last", [
    (8192, 64, True), (8192, 80, True), (8192, 128, False), (8192, 192, True), (8192, 256, False), (32, 64, False),
    (100, 64, True), (200, 112, False), (200, 96, True), (1000, 112, True), (1000, 128, False)])
def test_a_cache_is_read_in_the_layout_that_xla_gives_it(slots, size, last):
    assert attention_tpu.slots_last(slots, size) == last
