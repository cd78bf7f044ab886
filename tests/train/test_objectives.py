"""Objectives against a plain computation, and against the loop that their models serve in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax import sharding
from parallax.decoding import Sample, loop
from parallax.decoding.drafters import DraftModel
from parallax.models import Model
from parallax.testing import tiny_config, tiny_model
from parallax.train import corpus, data, losses, simulate
from parallax.train.loop import Program, Schedule
from parallax.train.objectives import OBJECTIVES, Distill, NextToken
from parallax.train.objectives.base import forward
from parallax.train.optimizer import Optimizer

DOCUMENTS = [([5, 9, 2, 7, 7, 1], 0), ([3, 3, 8, 1], 2), ([4, 6, 1], 0)]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def draft():
    model = Model(tiny_config(num_layers=1, hidden_size=16))
    return model, model.init(jax.random.key(5))


@pytest.fixture(scope="module")
def batch():
    """One row of three documents and padding, one of a part."""
    texts = corpus.from_documents(DOCUMENTS)
    found = next(iter(data.batches(texts, length=16, batch_size=2, seed=0)))
    return jax.tree.map(jnp.asarray, found)


def alone(model, params, tokens):
    """Logits of a document by itself."""
    one = data.Batch(jnp.asarray([tokens]), jnp.ones((1, len(tokens)), jnp.int32), jnp.arange(len(tokens))[None],
                     jnp.ones((1, len(tokens))))
    return forward(model, params, one)[0]


def test_packed_documents_do_not_see_each_other(target, batch):
    logits = jax.jit(forward, static_argnums=0)(*target, batch)
    for tokens, _ in DOCUMENTS:
        row, start = next((r, s) for r in range(2) for s in range(16 - len(tokens) + 1)
                          if batch.tokens[r, s:s + len(tokens)].tolist() == tokens)
        np.testing.assert_allclose(logits[row, start:start + len(tokens)], alone(*target, tokens), atol=1e-4)


def test_next_token_loss_is_the_mean_over_all_that_is_not_given(target, batch):
    model, params = target
    loss, metrics = jax.jit(NextToken(model=model).loss)(params, None, batch, KEY)
    costs, right = [], []
    for _ in range(int((batch.segments == 1).any(1).sum())):
        for tokens, prompt in DOCUMENTS:
            logp = np.asarray(jax.nn.log_softmax(alone(model, params, tokens)))
            for i in range(max(prompt, 1), len(tokens)):
                costs.append(-logp[i - 1, tokens[i]])
                right.append(logp[i - 1].argmax() == tokens[i])
    assert int(metrics["tokens"]) == len(costs)
    np.testing.assert_allclose([loss, metrics["accuracy"]], [np.mean(costs), np.mean(right)], rtol=1e-5)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_distillation_loss_is_the_registry_s_over_the_two_laws(target, draft, batch, name):
    objective = Distill(model=draft[0], target=target[0], loss_name=name, temperature=1.5, depth=2)
    loss, metrics = jax.jit(objective.loss)(draft[1], target[1], batch, KEY)
    logp, logq = (jax.nn.log_softmax(forward(*m, batch)[:, :-1] / 1.5) for m in (target, draft))
    weights = batch.weights[:, 1:]
    np.testing.assert_allclose(loss, (losses.LOSSES[name](logp, logq, batch.tokens[:, 1:]) * weights).sum()
                               / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["acceptance"], (losses.acceptance(logp, logq) * weights).sum() / weights.sum(),
                               rtol=1e-5)


def test_the_target_learns_nothing(target, draft, batch):
    objective = Distill(model=draft[0], target=target[0])
    grads = jax.jit(jax.grad(lambda frozen: objective.loss(draft[1], frozen, batch, KEY)[0]))(target[1])
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("change", [dict(position_weight="power"), dict(temperature=2.0), dict(loss_name="tv"),
                                    dict(position_weight="power", decay=0.5),
                                    dict(position_weight="power", depth=2)], ids=str)
def test_every_option_of_distillation_changes_the_loss(target, draft, batch, change):
    plain = Distill(model=draft[0], target=target[0], loss_name="forward_kl", depth=3)
    if len(change) > 1:
        plain = dataclasses.replace(plain, position_weight="power")
    first, second = (float(jax.jit(o.loss)(draft[1], target[1], batch, jax.random.key(3))[0])
                     for o in (plain, dataclasses.replace(plain, **change)))
    assert abs(first - second) > 1e-5


def test_the_expected_tokens_per_forward_are_those_of_equal_models_and_of_a_hand_example(target, batch):
    same = Distill(model=target[0], target=target[0], depth=2)
    assert float(jax.jit(same.loss)(target[1], target[1], batch, KEY)[1]["expected_tokens_per_forward"]) \
        == pytest.approx(3, abs=1e-4)
    alpha, weights = jnp.asarray([[0.5, 0.8, 0.1, 0.9]]), jnp.asarray([[1.0, 1.0, 1.0, 0.0]])
    by_hand = np.mean([1 + 0.5 + 0.5 * 0.8, 1 + 0.8 + 0.8 * 0.1])
    assert float(same._expected(alpha, weights)) == pytest.approx(by_hand)


def test_training_and_serving_see_the_same_law(target, draft):
    """The draft model's law in the loop, behind a cache and its own drafts, is that of one training forward."""
    prompts, length = np.asarray([[5, 9, 2, 7], [3, 8, 0, 0]]), np.asarray([4, 2])
    objective = Distill(model=draft[0], target=target[0], depth=3)
    decoder = objective.decoder()
    drafter = DraftModel(model=draft[0], sampler=Sample(), kind="sampled", draft_length=3)
    decoder = dataclasses.replace(decoder, drafter=drafter)
    inputs = loop.cast(decoder, {"target": target[1], "draft": draft[1]}, prompts, length, None, 0, 12, capacity=12)
    state = loop.prefill(inputs, 12)
    propose = jax.jit(lambda inputs, state: inputs.decoder.drafter.propose(
        inputs.params["draft"], state.own,
        decoder._context(inputs.params, state.tokens, state.length, state.cache, state.key))[0])
    proposed = propose(inputs, state)
    for b in range(2):
        text = prompts[b, :length[b]].tolist() + proposed.tokens[b, 1:].tolist()
        logq = jax.nn.log_softmax(alone(*draft, text))[length[b] - 1:length[b] + 2]
        np.testing.assert_allclose(proposed.logq[b], logq, atol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_serves_a_decoder_that_fits_its_model(target, draft, name):
    objective = NextToken(model=target[0]) if name == "next_token" else Distill(model=draft[0], target=target[0])
    objective.decoder().check()


def test_a_distilled_drafter_reaches_the_largest_accepted_length_on_a_text_it_knows_by_heart(target):
    """And decoding measures what was simulated."""
    texts = simulate.greedy_texts(*target, [[5, 9, 2], [7]], 16)
    rows = [(texts.tokens[i, :texts.length[i]].tolist(), int(texts.prompt_length[i])) for i in range(2)]
    model = Model(tiny_config(num_layers=1, hidden_size=32))
    objective = Distill(model=model, target=target[0], loss_name="ce", depth=3)
    program = Program(objective=objective, optimizer=Optimizer(learning_rate=0.02, warmup=5, weight_decay=0.0),
                      schedule=Schedule(steps=80), mesh=sharding.make_mesh(), seed=0, frozen=target[1])
    batches = data.batches(corpus.from_documents(rows), length=20, batch_size=2, seed=0)
    state = program.create()
    before = float(program.simulate(state.params, texts)["tokens_per_forward"])
    for _ in range(80):
        state, metrics = program.step(state, target[1], program.put(next(batches)))
    after = float(program.simulate(state.params, texts)["tokens_per_forward"])
    assert before < 2 and after == 4
    result = loop.decode(objective.decoder(), {"target": target[1], "draft": state.params}, [[5, 9, 2], [7, 0, 0]],
                         [3, 1], None, 0, [19, 17], capacity=19)
    assert (result.info.emitted.sum() / result.info.target_forwards.sum()) == after


def test_bad_options_are_refused(target, draft):
    with pytest.raises(ValueError, match="draft model's vocabulary has 11 tokens and the target's"):
        Distill(model=Model(tiny_config(vocab_size=11)), target=target[0])
    with pytest.raises(ValueError, match="unknown loss 'kl'"):
        Distill(model=draft[0], target=target[0], loss_name="kl")
    with pytest.raises(ValueError, match="depth must be at least 1"):
        Distill(model=draft[0], target=target[0], depth=0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        Distill(model=draft[0], target=target[0], temperature=0.0)
