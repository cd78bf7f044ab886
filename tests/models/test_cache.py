"""Commit and attention against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.kernels.attention import attend, buckets
from parallax.models.cache import KV, Cache, commit, truncate

LAYERS, BATCH, HEADS, SLOTS, SIZE, ROWS = 2, 3, 2, 12, 4, 5


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _cache(form, lengths, dtype=jnp.float32):
    def part(seed):
        stored = jnp.asarray(_random(LAYERS, BATCH, HEADS, SLOTS, SIZE, seed=seed), dtype)
        return stored if form == "stacked" else tuple(stored)

    return Cache(part(1), part(2), jnp.asarray(lengths, jnp.int32))


def _kv(dtype=jnp.float32, layers=LAYERS):
    k, v = (_random(layers, BATCH, ROWS, HEADS, SIZE, seed=seed) for seed in (3, 4))
    return KV(tuple(jnp.asarray(k, dtype)), tuple(jnp.asarray(v, dtype)), jnp.zeros((BATCH, ROWS), jnp.int32))


def _stack(part):
    return np.stack([np.asarray(layer, np.float32) for layer in part])


@pytest.mark.parametrize("form", ["stacked", "per_layer"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("lengths, rows, count", [
    ([0, 4, 7], [[0, 2, 4], [1, 1, 1], [4, 3, 0]], [3, 1, 2]),
    ([9, 0, 5], [[0, 1, 2], [4, 0, 0], [2, 0, 0]], [0, 1, 3]),
])
def test_commit_copies_the_chosen_rows_behind_each_length(form, dtype, lengths, rows, count):
    cache, kv = _cache(form, lengths, dtype), _kv(jnp.float32)
    after = jax.jit(commit)(cache, kv, jnp.asarray(rows), jnp.asarray(count))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    assert after.length.tolist() == np.add(lengths, count).tolist()
    for name in ("k", "v"):
        wanted = _stack(getattr(cache, name))
        new = _stack(jnp.asarray(layer, dtype) for layer in getattr(kv, name))
        for b, (start, take) in enumerate(zip(lengths, count)):
            wanted[:, b, :, start:start + take] = new[:, b][:, rows[b][:take]].swapaxes(1, 2)
            written = _stack(getattr(after, name))[:, b]
            np.testing.assert_array_equal(written[:, :, :start + take], wanted[:, b, :, :start + take])
            np.testing.assert_array_equal(written[:, :, start + len(rows[b]):], wanted[:, b, :, start + len(rows[b]):])


@pytest.mark.parametrize("form", ["stacked", "per_layer"])
@pytest.mark.parametrize("layers", [1, 3])
def test_commit_refuses_another_number_of_layers(form, layers):
    with pytest.raises(ValueError, match=f"{layers} layers to a cache of 2"):
        commit(_cache(form, [0, 0, 0]), _kv(layers=layers), jnp.zeros((BATCH, 1), int), jnp.ones(BATCH, int))


def test_truncate_only_ever_shortens():
    cache = _cache("per_layer", [3, 5, 0])
    shorter = truncate(cache, jnp.asarray([5, 2, 1]))
    assert shorter.length.tolist() == [3, 2, 0]
    assert shorter.k is cache.k and shorter.v is cache.v


@pytest.mark.parametrize("form", ["stacked", "per_layer"])
def test_capacity_is_the_number_of_slots(form):
    assert _cache(form, [0, 0, 0]).capacity == SLOTS


@pytest.mark.parametrize("capacity, sizes", [
    (1, (1,)), (127, (127,)), (128, (128,)), (129, (128, 129)), (256, (128, 256)), (300, (128, 256, 300)),
    (1024, (128, 256, 512, 1024)),
])
def test_buckets_double_and_end_with_the_capacity(capacity, sizes):
    assert buckets(capacity) == sizes


GROUP, CONTEXT, DEEP = 2, 2, 300


def _softmax_attention(q, k, v, cache, layer, visible, positions, key_positions, scale, softcap, window):
    """Row by row over the list of keys that the row sees."""
    out = np.zeros(q.shape)
    stored_k, stored_v = _stack(cache.k)[layer], _stack(cache.v)[layer]
    for b, h, g, t in np.ndindex(q.shape[:4]):
        far = -np.inf if window is None else positions[b, t] - window
        slots = [s for s in range(cache.length[b]) if s > far]
        own = [s for s in range(k.shape[2]) if visible[b, t, s] and key_positions[b, s] > far]
        keys = np.concatenate([stored_k[b, h, slots], k[b, h, own]]).astype(float)
        values = np.concatenate([stored_v[b, h, slots], v[b, h, own]])
        score = keys @ q[b, h, g, t] * scale
        score = score if softcap is None else softcap * np.tanh(score / softcap)
        weights = np.exp(score - score.max())
        out[b, h, g, t] = weights @ values / weights.sum()
    return out


_attend = jax.jit(attend, static_argnames=("layer", "scale", "softcap", "window"))


@pytest.mark.parametrize("softcap, window", [(None, None), (1.5, None), (None, 70), (1.5, 3)])
@pytest.mark.parametrize("lengths", [(0, 0), (1, 1), (127, 127), (128, 128), (129, 129), (0, 300), (257, 128)])
def test_attention_is_a_softmax_over_the_prefix_and_the_visible_rows(lengths, softcap, window):
    stored = _random(2, 2, 2, HEADS, DEEP, SIZE, seed=5)
    cache = Cache(tuple(jnp.asarray(stored[0])), tuple(jnp.asarray(stored[1])), jnp.asarray(lengths, jnp.int32))
    q = _random(2, HEADS, GROUP, ROWS, SIZE, seed=6) * 3
    k, v = _random(2, 2, HEADS, CONTEXT + ROWS, SIZE, seed=7)
    random = np.random.default_rng(sum(lengths))
    visible = random.random((2, ROWS, CONTEXT + ROWS)) < 0.5
    visible[:, np.arange(ROWS), CONTEXT + np.arange(ROWS)] = True            # a row sees itself
    positions = np.asarray(lengths)[:, None] + CONTEXT + random.integers(0, 4, (2, ROWS))
    key_positions = np.concatenate([np.asarray(lengths)[:, None] + np.arange(CONTEXT), positions], 1)
    options = dict(scale=0.7, softcap=softcap, window=window)
    ours = _attend(q, k, v, cache, 1, visible=visible, positions=positions, key_positions=key_positions, **options)
    wanted = _softmax_attention(q, k, v, cache, 1, visible, positions, key_positions, **options)
    np.testing.assert_allclose(ours, wanted, atol=2e-5)


def test_attention_reads_stacked_and_per_layer_caches_alike_and_nothing_behind_the_length():
    stored = jnp.asarray(_random(2, 2, HEADS, DEEP, SIZE, seed=5))
    lengths = jnp.asarray([130, 3])
    garbage = jnp.where(jnp.arange(DEEP)[:, None] >= lengths[:, None, None, None], 1e4, stored)
    q, k = _random(2, HEADS, GROUP, ROWS, SIZE, seed=6), _random(2, HEADS, ROWS, SIZE, seed=7)
    positions = lengths[:, None] + jnp.arange(ROWS)
    results = [_attend(q, k, k, Cache(form, form, lengths), 1, visible=np.tri(ROWS, dtype=bool)[None].repeat(2, 0),
                       positions=positions, key_positions=positions, scale=1.0, softcap=None, window=None)
               for form in (stored, tuple(stored), tuple(garbage))]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[1], results[2])


def test_attention_without_a_cache_sees_the_block_alone():
    q, k = _random(2, HEADS, GROUP, ROWS, SIZE, seed=6), _random(2, HEADS, ROWS, SIZE, seed=7)
    empty = jnp.zeros((2, HEADS, 0, SIZE))
    cache = Cache((empty,), (empty,), jnp.zeros(2, jnp.int32))
    visible, positions = np.tri(ROWS, dtype=bool)[None].repeat(2, 0), np.arange(ROWS)[None].repeat(2, 0)
    options = dict(scale=1.0, softcap=None, window=None)
    ours = _attend(q, k, k, cache, 0, visible=visible, positions=positions, key_positions=positions, **options)
    wanted = _softmax_attention(q, k, k, cache, 0, visible, positions, positions, **options)
    np.testing.assert_allclose(ours, wanted, atol=2e-5)
