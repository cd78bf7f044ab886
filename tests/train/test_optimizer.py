"""Every field of the optimizer changes something, and what it says it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.testing import tiny_model
from parallax.train.optimizer import Optimizer, decays


def updates(optimizer, grad=1.0, steps=3, accumulate=1):
    """The updates of one matrix entry that is 1 and has the same gradient in every step."""
    transform = optimizer.build(10, accumulate)
    params = {"w": jnp.ones((1,)), "scale": jnp.ones((1,))}
    state, result = transform.init(params), []
    for _ in range(steps):
        change, state = transform.update(jax.tree.map(lambda x: grad * x, params), state, params)
        result.append([float(change["w"][0]), float(change["scale"][0])])
    return np.asarray(result)


PLAIN = dict(learning_rate=0.1, schedule="constant", warmup=0, weight_decay=0.0, clip_norm=0.0)


@pytest.mark.parametrize("schedule, at_0_5_10", [
    ("constant", (0.1, 0.1, 0.1)),
    ("linear", (0.1, 0.06, 0.02)),
    ("cosine", (0.1, 0.06, 0.02)),
    ("wsd", (0.1, 0.1, 0.02)),
])
def test_a_schedule_goes_from_the_largest_rate_to_the_last(schedule, at_0_5_10):
    rate = Optimizer(learning_rate=0.1, schedule=schedule, warmup=0, final=0.2).rate(10)
    np.testing.assert_allclose([rate(0), rate(5), rate(10)], at_0_5_10, rtol=1e-5)


def test_the_warm_up_rises_to_the_largest_rate_and_never_outlasts_the_run():
    rate = Optimizer(learning_rate=0.1, schedule="constant", warmup=4).rate(10)
    np.testing.assert_allclose([rate(i) for i in (0, 2, 4, 9)], [0.025, 0.0625, 0.1, 0.1], rtol=1e-5)
    assert float(Optimizer(learning_rate=0.1, warmup=100).rate(10)(9)) > 0.09


def test_the_first_update_of_adam_is_the_learning_rate():
    np.testing.assert_allclose(updates(Optimizer(**PLAIN))[0], -0.1, rtol=1e-5)


def test_weight_decay_pulls_matrices_and_leaves_scales():
    plain, decayed = updates(Optimizer(**PLAIN))[0], updates(Optimizer(**{**PLAIN, "weight_decay": 0.5}))[0]
    np.testing.assert_allclose(decayed - plain, [-0.1 * 0.5, 0], atol=1e-6)


def test_decay_is_for_matrices_and_embeddings_also_where_layers_are_stacked():
    for scan in (False, True):
        model, params = tiny_model(scan_layers=scan, qkv_bias=True)
        marked = jax.tree_util.tree_flatten_with_path(decays(params))[0]
        names = {(entry[0][-2 + scan if entry[0][0].key == "layers" else -1].key, entry[1]) for entry in marked}
        assert ("w", True) in names and ("tokens", True) in names
        assert ("scale", False) in names and ("b", False) in names


@pytest.mark.parametrize("field, value", [("b1", 0.5), ("b2", 0.5), ("eps", 1.0), ("clip_norm", 0.1)])
def test_other_fields_change_the_updates(field, value):
    transform = [Optimizer(**{**PLAIN, **change}).build(10, 1) for change in ({}, {field: value})]
    params, seen = {"w": jnp.ones((1,))}, []
    for t in transform:
        state = t.init(params)
        for grad in (1.0, 0.02, -1.0):
            change, state = t.update({"w": jnp.full((1,), grad)}, state, params)
        seen.append(float(change["w"][0]))
    assert abs(seen[0] - seen[1]) > 1e-4


def test_accumulation_updates_once_with_the_mean_gradient():
    np.testing.assert_allclose(updates(Optimizer(**PLAIN), accumulate=3)[:2], 0)
    np.testing.assert_allclose(updates(Optimizer(**PLAIN), accumulate=3)[2], -0.1, rtol=1e-5)


@pytest.mark.parametrize("change, message", [
    (dict(schedule="cosin"), "unknown schedule 'cosin': expected one of constant, .*; did you mean 'cosine'"),
    (dict(learning_rate=0.0), "learning_rate and eps must be above 0"),
    (dict(learning_rate=-1.0), "learning_rate must be from 0 to inf, got -1"),
    (dict(final=2.0), "final must be from 0 to 1, got 2"),
    (dict(ema=1.0), "ema, b1 and b2 below 1"),
    (dict(b1=1.0), "ema, b1 and b2 below 1"),
])
def test_values_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Optimizer(**change)
