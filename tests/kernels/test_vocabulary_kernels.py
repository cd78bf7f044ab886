"""One pass over the vocabulary: both kernels, interpreted, and the reference against float64 numpy.

B sequences, N rows, V vocabulary, R noise rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from parallax.kernels import vocabulary, vocabulary_gpu, vocabulary_tpu
from parallax.kernels.vocabulary import Noise

ALL = ("best", "second", "lse", "mean")
# Largest errors: of values relative to their size, of sums over the vocabulary in nats.
VALUE, SUM = 3e-7, 3e-6
TPU = functools.partial(vocabulary_tpu.stretches, interpret=True)
GPU = functools.partial(vocabulary_gpu.stretches, interpret=True)
VERSIONS = {"xla": vocabulary.reference, "tpu": functools.partial(vocabulary.statistics_by, TPU),
            "gpu": functools.partial(vocabulary.statistics_by, GPU)}
LEFT = {"xla": vocabulary.residual_reference}
for _name, _module in ("tpu", vocabulary_tpu), ("gpu", vocabulary_gpu):
    LEFT[_name] = functools.partial(vocabulary.residual_by, functools.partial(_module.leftovers, interpret=True))


def logits_of(random, shape, ties=False, excluded=0.0):
    """Rows of many scales. Some with equal values, some with excluded tokens, never all of them."""
    x = (random.normal(size=shape) * random.uniform(0.1, 20, (*shape[:2], 1))).astype(np.float32)
    x = np.round(x) if ties else x
    out = random.random(shape) < excluded
    out[..., random.integers(shape[-1])] = False
    return np.where(out, -np.inf, x)


def keys_of(random, *shape):
    return jax.random.wrap_key_data(random.integers(2**32, size=(*shape, 2), dtype=np.uint32))


def noise_of(random, batch, rows, depths):
    return Noise(keys_of(random, batch, depths), random.integers(depths, size=(batch, rows)).astype(np.int32))


@functools.partial(jax.jit, static_argnums=0)
def gumbel(size, keys):
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(keys)


def expected(x, temperature, noise):
    """In float64: the statistics, and z + noise."""
    x = np.asarray(x, np.float64)
    top, best = x.max(-1), x.argmax(-1)
    z = (x - top[..., None]) / (1 if temperature is None else np.asarray(temperature, np.float64)[:, None, None])
    weights = np.exp(z)
    total = weights.sum(-1)
    others = z.copy()
    np.put_along_axis(others, best[..., None], -np.inf, -1)
    mean = np.where(weights > 0, weights * np.where(weights > 0, z, 0), 0).sum(-1) / total
    said = vocabulary.Statistics(top, best, others.max(-1), np.log(total), mean)
    if noise is None:
        return said, None
    rows = np.take_along_axis(np.asarray(gumbel(x.shape[-1], noise.keys)), np.asarray(noise.row)[..., None], 1)
    return said, z + rows


def check(version, x, temperature=None, noise=None, **options):
    run = jax.jit(functools.partial(VERSIONS[version], want=ALL, **options))
    said = jax.tree.map(np.asarray, run(x, temperature, noise))
    right, scores = expected(x, temperature, noise)
    np.testing.assert_array_equal(said.top, right.top.astype(np.float32))
    np.testing.assert_array_equal(said.best, right.best)
    np.testing.assert_allclose(said.second, right.second, rtol=VALUE)
    np.testing.assert_allclose(said.lse, right.lse, atol=SUM)
    np.testing.assert_allclose(said.mean, right.mean, atol=SUM * (1 + np.abs(right.mean).max()))
    if noise is None:
        assert said.drawn is None
    else:
        taken = np.take_along_axis(scores, said.drawn[..., None], -1)[..., 0]
        np.testing.assert_allclose(taken, scores.max(-1), atol=1e-5)
    return said


SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 5, 8, 19, 66]), st.sampled_from([1, 37, 128, 999, 5000]),
                   st.integers(1, 9))


@pytest.mark.parametrize("version", ["tpu", "gpu"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(SHAPES, st.booleans(), st.sampled_from([0.0, 0.5, 0.99]), st.sampled_from([None, 0.05, 1.7]), st.integers(0, 99))
def test_statistics_are_those_of_numpy(version, shape, ties, excluded, temperature, seed):
    batch, rows, size, depths = shape
    random = np.random.default_rng(seed)
    temperature = None if temperature is None else temperature * random.uniform(0.5, 2, batch).astype(np.float32)
    check(version, logits_of(random, (batch, rows, size), ties, excluded), temperature,
          noise_of(random, batch, rows, depths))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rows, size, depths", [(64, 9001, 3), (1, 70_000, 1), (5, 49_152, 2), (70, 5000, 2)])
def test_stretches_are_joined_in_order(version, rows, size, depths):
    """The largest logit occurs three times, in several stretches and lanes; whole stretches have nothing but -inf."""
    random = np.random.default_rng(rows)
    x = logits_of(random, (1, rows, size), ties=True)
    places = np.sort(random.integers(size, size=(rows, 3)), -1)
    for row, places_ in enumerate(places):
        x[0, row, places_] = 99
    x[0, :rows // 2, 4100:-1] = np.where(x[0, :rows // 2, 4100:-1] == 99, 99, -np.inf)
    said = check(version, x, np.asarray([0.8], np.float32), noise_of(random, 1, rows, depths))
    assert (said.best[0] == places[:, 0]).all()
    assert (said.second[0] == 0).all()


@pytest.mark.parametrize("version", ["tpu", "gpu"])
def test_the_token_is_that_of_the_reference_also_for_extreme_temperatures(version):
    random = np.random.default_rng(0)
    x, noise = logits_of(random, (4, 6, 3000), excluded=0.3), noise_of(random, 4, 6, 3)
    temperature = np.asarray([1e-30, 1e-3, 1, 1e30], np.float32)
    ours, reference = (jax.jit(functools.partial(VERSIONS[name], want=("best", "lse")))(x, temperature, noise)
                       for name in (version, "xla"))
    np.testing.assert_array_equal(ours.drawn, reference.drawn)
    np.testing.assert_allclose(ours.lse, reference.lse, atol=SUM)
    assert (ours.drawn[0] == ours.best[0]).all()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("place", [0, 4999])
def test_a_row_with_nan_shows_it_and_spoils_no_other(version, place):
    x = logits_of(np.random.default_rng(1), (1, 8, 5000))
    right = expected(x, None, None)[0]
    x[0, 3, place] = np.nan
    said = jax.jit(functools.partial(VERSIONS[version], want=ALL))(x, None, None)
    assert np.isnan(said.lse[0, 3]) and 0 <= said.best[0, 3] < 5000
    others = np.arange(8) != 3
    np.testing.assert_array_equal(said.best[0, others], right.best[0, others])
    np.testing.assert_allclose(said.lse[0, others], right.lse[0, others], atol=SUM)


def test_the_simulated_tpu_says_the_same():
    random = np.random.default_rng(2)
    x, noise = logits_of(random, (1, 40, 9000), excluded=0.2), noise_of(random, 1, 40, 2)
    options = pltpu.InterpretParams() if hasattr(pltpu, "InterpretParams") else True
    run = jax.jit(functools.partial(vocabulary.statistics_by, vocabulary_tpu.stretches, want=ALL, interpret=options))
    for ours, plain in zip(run(x, None, noise), check("tpu", x, None, noise)):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


@pytest.mark.parametrize("version", ["tpu", "gpu"])
def test_what_is_not_asked_for_is_not_computed(version):
    x, noise = jnp.zeros((1, 16, 300)), noise_of(np.random.default_rng(0), 1, 16, 3)

    def program(want, noise=None):
        return jax.jit(functools.partial(VERSIONS[version], want=want)).lower(x, None, noise).compile().as_text()

    greedy, law, drawn = program(("best",)), program(("lse",)), program((), noise)
    assert " exponential(" not in greedy and " log(" not in greedy and " xor(" not in greedy
    assert " exponential(" in law and " xor(" not in law
    assert " xor(" in drawn
    said = vocabulary.statistics(x, ("best",), kernels="pallas")
    assert said.best is not None and said.second is said.lse is said.mean is said.drawn is None


def test_confidence_is_that_of_the_law():
    x = logits_of(np.random.default_rng(3), (2, 7, 500), excluded=0.5)
    law = np.exp(np.asarray(x, np.float64) / 2.0)
    law /= law.sum(-1, keepdims=True)
    two = np.sort(law, -1)[..., -2:]
    entropy = -np.where(law > 0, law * np.log(np.where(law > 0, law, 1)), 0).sum(-1)
    for kernels in ("xla", "pallas"):
        said = jax.jit(functools.partial(vocabulary.confidence, temperature=2.0, kernels=kernels))(x)
        np.testing.assert_array_equal(said.token, law.argmax(-1))
        np.testing.assert_allclose(said.probability, two[..., 1], atol=SUM)
        np.testing.assert_allclose(said.margin, two[..., 1] - two[..., 0], atol=SUM)
        np.testing.assert_allclose(said.entropy, entropy, atol=1e-5)


def log_softmax(z):
    z = np.asarray(z, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def residual_case(random, batch, rows, size, temperature):
    """(operands of the versions, log p of all rows, log q); q is near p, so that little is left."""
    x = logits_of(random, (batch, rows, size), excluded=0.4)
    kept = max(rows - 1, 1)
    logq = log_softmax(x[:, :kept] / temperature + random.normal(size=(batch, kept, size)) * 0.3)
    node = random.integers(rows, size=batch).astype(np.int32)
    rejected = (random.random(batch) < 0.7) & (node < kept)
    here = np.arange(batch), node
    said, temperatures = expected(x, np.full(batch, temperature), None)[0], np.full(batch, temperature, np.float32)
    top, lse = (np.asarray(value[here], np.float32) for value in (said.top, said.lse))
    operands = x, np.float32(logq), top, lse, node, rejected, keys_of(random, batch), temperatures
    return operands, log_softmax(x / temperature), logq


@pytest.mark.parametrize("version", ["tpu", "gpu"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.sampled_from([1, 2, 7, 8, 21]), st.sampled_from([2, 37, 999, 40_000]), st.integers(0, 99))
def test_the_residual_token_is_that_of_numpy(version, batch, rows, size, seed):
    operands, logp, logq = residual_case(np.random.default_rng(seed), batch, rows, size, 0.7)
    *_, node, rejected, keys, _ = operands
    p, q = np.exp(logp[np.arange(batch), node]), np.exp(logq[np.arange(batch), np.minimum(node, logq.shape[1] - 1)])
    token = np.asarray(jax.jit(LEFT[version])(*operands))
    rest = np.where((rejected & (p > q).any(-1))[:, None], np.maximum(p - q, 0), p)
    with np.errstate(divide="ignore"):
        scores = np.log(rest) + np.asarray(gumbel(size, keys[:, None]))[:, 0]
    # Where p and q are near each other their difference is rounded.
    np.testing.assert_allclose(scores[np.arange(batch), token], scores.max(-1), atol=1e-4)


@pytest.mark.parametrize("version", LEFT)
def test_p_itself_is_drawn_from_where_nothing_is_left_or_q_is_no_number(version):
    (x, _, _, _, _, _, keys, temperature), logp, _ = residual_case(np.random.default_rng(5), 3, 4, 999, 0.9)
    node, rejected = np.asarray([0, 1, 2], np.int32), np.asarray([True, True, False])
    here = np.arange(3), node
    said = expected(x, temperature, None)[0]
    logq = np.float32(logp[:, :3]) + 1e-3
    logq[1] = np.nan
    token = jax.jit(LEFT[version])(x, logq, np.float32(said.top[here]), np.float32(said.lse[here]), node, rejected,
                                   keys, temperature)
    np.testing.assert_array_equal(token, np.argmax(logp[here] + np.asarray(gumbel(999, keys[:, None]))[:, 0], -1))
