"""The target's own first layers as the drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import EarlyExit, Sample, check_settings, loop, make_decoder
from parallax.decoding.base import Context
from parallax.testing import CHECKS, Case, MarkovModel, reference_decode

WARM = Sample(temperature=0.8, top_k=6)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)],
                ids=["scanned", "unrolled"])
def case(request):
    return dataclasses.replace(Case.tiny(vocab_size=7, num_layers=3, scan_layers=request.param), new_tokens=12)


@pytest.mark.parametrize("sampler, verifier", [(None, "follow"), (WARM, "follow"), (WARM, "rejection")])
def test_an_exit_behind_the_last_layer_is_the_target_and_all_is_accepted(sampler, verifier, case):
    settings = {} if sampler is None else dict(sampler=sampler, verifier=verifier)
    ours = make_decoder("early_exit", case.model, exit_layer=3, draft_length=3, **settings)
    inputs = case.inputs(ours, limits=[len(p) + 12 for p in case.prompts])
    info = loop.run(inputs, case.capacity).info
    assert (info.accepted == info.proposed).all() and (info.emitted == 4 * info.target_forwards).all()
    assert (info.draft_forwards == 3 * info.target_forwards).all() and (info.draft_rows == info.draft_forwards).all()
    if verifier == "follow":
        CHECKS["equals_plain_decoding"](ours, case)


@pytest.mark.often("0.5")
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_every_token_is_what_its_layers_alone_would_write(decay, case):
    """Against a model that has only these layers. Keys and values of a layer do not depend on what lies above it."""
    ours = make_decoder("early_exit", case.model, exit_layer=2, decay=decay, draft_length=3)
    layers = ours.drafter.layers(3)
    assert layers == ((2, 2, 2) if decay == 1 else (2, 1, 1))
    inputs = case.inputs(ours)
    state = loop.prefill(inputs, case.capacity)
    few = {count: _first(case, count) for count in set(layers)}
    steps = 0
    while not np.asarray(state.done).all():
        tokens, length, done = jax.tree.map(np.asarray, (state.tokens, state.length, state.done))
        draft = _propose(inputs.decoder, inputs.params, state)
        for b in np.flatnonzero(~done)[:2]:
            text = tokens[b, :length[b]].tolist()
            for token, count in zip(np.asarray(draft.tokens)[b, 1:].tolist(), layers):
                text = reference_decode(*few[count], text, len(text) + 1)
                assert token == text[-1]
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        steps += 1
    assert steps < 12
    CHECKS["equals_plain_decoding"](ours, case)
    CHECKS["every_step"](ours, case)


@jax.jit
def _propose(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    return decoder.drafter.propose(None, state.own, ctx)[0]


def _first(case, count):
    """A model of the first layers."""
    model = type(case.model)(dataclasses.replace(case.model.config, num_layers=count))
    params = case.params["target"]
    return model, {**params, "layers": jax.tree.map(lambda w: w[:count], params["layers"],
                                                    is_leaf=lambda w: isinstance(w, tuple))}


def test_it_grows_trees_and_stops_as_a_draft_model_does(case):
    ours = make_decoder("early_exit", case.model, exit_layer=2, tree="beam(2, 3, 5)", controller="dynamic_depth")
    CHECKS["equals_plain_decoding"](ours, case)
    CHECKS["batch_independence"](ours, case)


def test_the_depth_decays_as_the_paper_says():
    ours = EarlyExit(exit_layer=32, decay=0.9, draft_length=6)
    assert ours.layers(32) == (32, 28, 25, 23, 20, 18)
    assert EarlyExit(draft_length=2).layers(30) == (10, 10) and EarlyExit(draft_length=1).layers(2) == (1,)
    assert EarlyExit(exit_layer=2, decay=0.1, draft_length=3).layers(4) == (2, 1, 1)


@pytest.mark.parametrize("options, message", [
    (dict(exit_layer=-1), "exit_layer must be a number of layers, 0 for a third of them, got -1"),
    (dict(decay=0.0), r"decay must be in \(0, 1\], got 0.0"),
    (dict(decay=1.5), r"decay must be in \(0, 1\], got 1.5"),
    (dict(draft_length=0), "draft_length must be at least 1"),
])
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_settings("early_exit", options)


def test_more_layers_than_the_target_has_are_refused():
    with pytest.raises(ValueError, match="exit_layer must be at most the target's 1 layers, got 2"):
        make_decoder("early_exit", MarkovModel.create(np.zeros((3, 3)))[0], exit_layer=2)
