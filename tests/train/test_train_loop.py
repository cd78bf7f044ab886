"""What one update does, and what stops a run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallax import sharding
from parallax.testing import tiny_model
from parallax.train import corpus, data
from parallax.train.checkpoints import Checkpoints
from parallax.train.loop import Program, Schedule, TrainState, join, rest, run
from parallax.train.metrics import Metrics
from parallax.train.objectives import NextToken
from parallax.train.optimizer import Optimizer

TEXTS = corpus.from_documents([([(3 * i + j * j) % 61 for j in range(15)], 0) for i in range(10)])


def program(**changes):
    model = tiny_model()[0]
    base = Program(objective=NextToken(model=model), optimizer=Optimizer(warmup=0, schedule="constant"),
                   schedule=Schedule(steps=6, log_every=2, eval_every=3, checkpoint_every=2), mesh=sharding.make_mesh(),
                   seed=0)
    return dataclasses.replace(base, **changes)


def batches():
    return data.batches(TEXTS, length=16, batch_size=4, seed=0)


def after(program, steps=3):
    state, source = program.create(), batches()
    for _ in range(steps):
        state, metrics = program.step(state, None, program.put(next(source)))
    return state, metrics


def assert_equal(ours, theirs, **tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if tolerance:
            np.testing.assert_allclose(a, b, **tolerance)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def plain():
    return after(program())


def test_training_lowers_the_loss_and_compiles_once(plain):
    one = program()
    state, source = one.create(), batches()
    first = None
    for _ in range(12):
        state, metrics = one.step(state, None, one.put(next(source)))
        first = first or float(metrics["loss"])
    assert float(metrics["loss"]) < first and int(state.step) == 12
    assert one.step._cache_size() == 1


def test_the_seed_decides_the_weights(plain):
    same, other = program().create(), program(seed=1).create()
    assert_equal(program().create().params, same.params)
    assert not np.array_equal(same.params["embed"]["tokens"], other.params["embed"]["tokens"])


def test_micro_batches_give_the_update_of_the_whole_batch():
    """Also where one has far fewer targets than the other."""
    whole, parts = program(), program(schedule=Schedule(steps=6, accumulate=2))
    batch = next(batches())
    batch.weights[::2, 4:] = 0                                           # every other row: one micro-batch
    states, metrics = zip(*(one.step(one.create(), None, one.put(batch)) for one in (whole, parts)))
    gradients = [optax.tree_utils.tree_get(state.opt_state, "mu") for state in states]
    assert_equal(gradients[1], gradients[0], atol=1e-6)
    assert_equal(states[1].params, states[0].params, atol=2e-4)
    assert [float(m["tokens"]) for m in metrics] == [float(batch.weights[:, 1:].sum())] * 2
    np.testing.assert_allclose(metrics[1]["loss"], metrics[0]["loss"], rtol=1e-5)
    assert [int(state.step) for state in states] == [1, 1]


def test_the_average_follows_the_parameters_slowly_and_faster_at_first(plain):
    state, _ = after(program(optimizer=Optimizer(warmup=0, schedule="constant", ema=0.15)))
    assert_equal(state.params, plain[0].params)
    one, source = program(), batches()
    trace = one.create()
    expected = jax.tree.map(jnp.copy, trace.params)                       # a step takes the state over
    for decay in (1 / 10, 0.15, 0.15):                                   # at most (1 + t) / (10 + t)
        trace, _ = one.step(trace, None, one.put(next(source)))
        expected = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * new, expected, trace.params)
    assert_equal(state.ema, expected, atol=1e-6)
    assert state.best is state.ema and plain[0].best is plain[0].params


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters(plain):
    half = program(objective=NextToken(model=tiny_model(dtype="bfloat16")[0]))
    state, metrics = after(half)
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float32"}
    difference = abs(float(metrics["loss"]) - float(plain[1]["loss"]))
    assert 0 < difference < 0.1


def test_an_evaluation_is_the_mean_over_all_held_out_targets(plain):
    one, held_out = program(), list(data.held_out_batches(TEXTS, length=16, batch_size=4))
    params = plain[0].params
    each = [one.objective.loss(params, None, jax.tree.map(jnp.asarray, batch), jax.random.key(0)) for batch in held_out]
    counts = [float(metrics["tokens"]) for _, metrics in each]
    expected = sum(float(loss) * n for (loss, _), n in zip(each, counts)) / sum(counts)
    assert counts[-1] < counts[0]
    assert one.evaluate(params, held_out)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_state_comes_apart_and_together_again(plain):
    state = plain[0]
    again = join(state.params, rest(state))
    assert isinstance(again, TrainState)
    assert_equal(again, state)


def test_a_run_writes_figures_and_checkpoints_and_leaves_the_data_where_it_belongs(tmp_path):
    one, source = program(), batches()
    with Checkpoints(tmp_path, keep=2) as checkpoints, Metrics(tmp_path) as metrics:
        state = run(one, one.create(), source, checkpoints=checkpoints, metrics=metrics,
                    evaluate=lambda params: {"loss": 1.5})
        assert checkpoints.latest() == 6 and int(state.step) == 6
        like = one.like
        _, _, _, place = checkpoints.resume(like.params, rest(like))
    fresh = batches()
    fresh.set_state(place)
    assert_equal(next(fresh), next(source))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line.count("train/loss") for line in lines] == [1, 0, 1, 1, 0]       # 2, evaluation at 3, 4, 6, and at 6


@pytest.mark.parametrize("scale, step", [(np.nan, 1), (1e30, 1)])
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(tmp_path, scale, step):
    one = program()
    state = one.create()
    with Checkpoints(tmp_path, keep=2) as checkpoints, Metrics(tmp_path) as metrics:
        def go(state, evaluate=lambda params: {}):
            return run(one, state, batches(), checkpoints=checkpoints, metrics=metrics, evaluate=evaluate)

        broken = state._replace(params=jax.tree.map(lambda x: x * scale, state.params))
        with pytest.raises(FloatingPointError, match=r"is \w+ at step 1; no checkpoint was written yet"):
            go(broken)
        good = go(one.create())
        broken = good._replace(params=jax.tree.map(lambda x: x * scale, good.params), step=jnp.int32(5))
        with pytest.raises(FloatingPointError, match="at step 6; the last good checkpoint is step 6"):
            go(broken)


def test_numbers_below_one_are_refused():
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        Schedule(steps=3, checkpoint_every=0)
