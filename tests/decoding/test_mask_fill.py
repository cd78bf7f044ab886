"""A chain read off the masks of one forward: what each mask sees, its law, its cache, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    Follow,
    Greedy,
    MaskFill,
    Rejection,
    Sample,
    Speculative,
    check_settings,
    loop,
    make_decoder,
    options_of,
)
from parallax.decoding.base import Context
from parallax.models import Block, Model
from parallax.testing import (
    CHECKS,
    Case,
    MarkovModel,
    check_cache,
    markov_law,
    p_value,
    sample_many,
    tiny_config,
    tiny_model,
)

LENGTH, MASK, WINDOW, SIZE = 3, 2, 6, 32
WARM = Sample(temperature=0.8)
OTHER = dict(vocab_size=7, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
MODELS = {"causal_shifted": dict(), "causal_same": dict(alignment="same"),
          "full_same": dict(alignment="same", visibility="full"), "full_shifted": dict(visibility="full"),
          "block_causal_same": dict(alignment="same", visibility="block_causal")}


@pytest.fixture(scope="module")
def case():
    case = Case.tiny(vocab_size=7)
    _, draft = tiny_model(seed=1, **OTHER)
    return dataclasses.replace(case, params={**case.params, "draft": draft}, new_tokens=12)


def decoder(case, kind="deterministic", model="causal_shifted", **changes):
    sampler = Greedy() if kind == "deterministic" else WARM
    drafter = MaskFill(**{"model": Model(tiny_config(**OTHER, **MODELS[model])), "sampler": sampler, "kind": kind,
                          "draft_length": LENGTH, "mask_token": MASK, "window": WINDOW, **changes})
    verifier = Rejection(sampler=sampler) if kind == "sampled" else Follow(sampler=sampler)
    return Speculative(model=case.model, drafter=drafter, verifier=verifier, chunk=4)


@jax.jit
def _propose(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    return decoder.drafter.propose(params["draft"], state.own, ctx)


@jax.jit
def _logits(drafter, params, tokens, visible):
    model = drafter.model
    positions = jnp.arange(SIZE)[None]
    out = model.forward(params, Block(tokens, positions, visible), model.new_cache(1, 0))
    return model.unembed(params, out.hidden)[0]


def laws(drafter, params, text):
    """Log-probabilities of the draft, from one cache-free forward over the text and the masks."""
    config, end = drafter.model.config, len(text)
    row = np.full((1, SIZE), MASK)
    row[0, :end] = text
    rows = end + LENGTH - (config.alignment == "shifted")
    visible = np.tri(SIZE, dtype=bool)
    if config.visibility != "causal":
        visible = np.eye(SIZE, dtype=bool)
        visible[:rows, max(0, end - WINDOW):rows] = True
    first = end - (config.alignment == "shifted")
    logits = _logits(drafter, params, jnp.asarray(row), jnp.asarray(visible))[first:first + LENGTH]
    return np.asarray(logits.at[:, MASK].set(-jnp.inf))


@pytest.mark.often("full_shifted|causal_same-coupled|causal_shifted-sampled")
@pytest.mark.parametrize("model, kind", [*((model, "deterministic") for model in MODELS), ("causal_shifted", "sampled"),
                                         ("full_same", "sampled"), ("causal_same", "coupled")])
def test_every_draft_is_read_off_the_masks_behind_the_text(model, kind, case):
    ours, params = decoder(case, kind, model), case.params["draft"]
    inputs = case.inputs(ours)
    state, right = loop.prefill(inputs, case.capacity), 0
    while not np.asarray(state.done).all():
        draft, own = _propose(inputs.decoder, inputs.params, state)
        assert (draft.kind, draft.depth, draft.forwards, draft.certain) == (kind, LENGTH, 1, True)
        for b in np.flatnonzero(~np.asarray(state.done)):
            end = int(state.length[b])
            law = laws(ours.drafter, params, np.asarray(state.tokens)[b, :end].tolist())
            drafted = np.asarray(draft.tokens)[b]
            assert drafted[0] == state.tokens[b, end - 1] and not (drafted[1:] == MASK).any()
            if kind == "deterministic":
                assert drafted[1:].tolist() == law.argmax(-1).tolist()
            if kind == "sampled":
                expected = jax.nn.log_softmax(law / 0.8, -1)
                np.testing.assert_allclose(draft.logq[b], expected, rtol=1e-3, atol=1e-3)
            if kind == "coupled":
                drawn = WARM.draw(jnp.asarray(law)[None], state.key[b:b + 1], state.length[b:b + 1],
                                  jnp.arange(LENGTH), LENGTH)
                assert drafted[1:].tolist() == drawn[0].tolist()
            if ours.drafter.model.config.visibility == "causal":
                assert own.length[b] == end                             # the pending token went in, no mask did
        if ours.drafter.model.config.visibility == "causal":
            check_cache(ours.drafter.model, params, state.tokens, own)
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        right += int(info.accepted.sum())
    assert right
    if kind != "sampled":
        expected = case.reference(jax.tree.map(jnp.float32, ours.verifier.sampler))
        for row, end, text in zip(np.asarray(state.tokens), state.length, expected):
            assert row[:end].tolist() == text


def test_a_model_that_sees_both_ways_does_not_depend_on_the_batch(case):
    CHECKS["batch_independence"](decoder(case, "coupled", "full_same"), case)


def test_the_window_is_all_that_such_a_model_sees(case):
    def texts(window):
        ours = decoder(case, "deterministic", "full_same", window=window)
        inputs = case.inputs(ours)
        return np.asarray(_propose(inputs.decoder, inputs.params, loop.prefill(inputs, case.capacity))[0].tokens)

    assert (texts(12) == texts(30)).all() and (texts(1) != texts(12)).any()    # the prompts have up to 12 tokens


def test_marginals_verified_by_rejection_leave_the_targets_law():
    table = np.random.default_rng(0).normal(size=(3, 3))
    target, params = MarkovModel.create(table)
    small, weights = tiny_model(vocab_size=3, num_layers=1, alignment="same")
    drafter = MaskFill(model=small, sampler=Sample(), kind="sampled", draft_length=2, mask_token=2)
    ours = Speculative(model=target, drafter=drafter, verifier=Rejection(sampler=Sample()))
    samples = sample_many(ours, {"target": params, "draft": weights}, [0, 1], 4, 10_000)
    law = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    assert p_value(samples, markov_law(law, 1, 4)) > 1e-3


def test_nothing_is_drafted_where_the_draft_models_positions_end(case):
    model, params = tiny_model(seed=1, **{**OTHER, "positions": "learned", "max_positions": 16})
    short = dataclasses.replace(case, params={**case.params, "draft": params})
    ours = decoder(case, model="causal_shifted")
    ours = dataclasses.replace(ours, drafter=dataclasses.replace(ours.drafter, model=model))
    inputs = short.inputs(ours)
    state = loop.prefill(inputs, case.capacity)
    while not np.asarray(state.done).all():
        draft, _ = _propose(inputs.decoder, inputs.params, state)
        for b in np.flatnonzero(~np.asarray(state.done)):
            known = int(state.length[b]) - 2 + np.arange(1, LENGTH + 1) < 16
            assert draft.valid[b].tolist() == [True, *known.tolist()]
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
    for row, end, text in zip(np.asarray(state.tokens), state.length, case.reference(Greedy())):
        assert row[:end].tolist() == text


def test_its_options_and_how_the_verifier_decides_its_kind(case):
    assert options_of("mask_fill") == {"draft_length": 4, "mask_token": -1, "window": 128}
    model = Model(tiny_config(**OTHER))
    for verifier, kind in (("follow", "coupled"), ("rejection", "sampled")):
        ours = make_decoder("mask_fill", case.model, draft=model, sampler=WARM, verifier=verifier)
        assert ours.drafter.kind == kind
    last = [_first_draft(case, model, mask_token=token) for token in (-1, 6, 3)]
    assert last[0] == last[1] != last[2]


def _first_draft(case, model, **options):
    inputs = case.inputs(make_decoder("mask_fill", case.model, draft=model, **options))
    return np.asarray(_propose(inputs.decoder, inputs.params, loop.prefill(inputs, case.capacity))[0].tokens).tolist()


@pytest.mark.parametrize("options, message", [
    (dict(draft_length=0), "draft_length must be at least 1, got 0"), (dict(window=0), "window must be at least 1"),
    (dict(mask=3), "has no option 'mask': expected one of draft_length, mask_token, window")])
def test_options_out_of_range_are_refused_without_a_model(options, message):
    with pytest.raises(ValueError, match=message):
        check_settings("mask_fill", options, draft=True)


@pytest.mark.parametrize("changes, message", [
    (dict(mask_token=7), "mask_token must be a token of the draft model, below 7, got 7"),
    (dict(mask_token=-8), "got -8"),
    (dict(model=Model(tiny_config(**{**OTHER, "vocab_size": 8}))), "expected 7 tokens, got 8"),
    (dict(kind="sampled"), "a sampled draft needs a sampler with a temperature"),
])
def test_what_does_not_fit_the_models_is_refused_in_one_line(changes, message, case):
    drafter = MaskFill(**{"model": Model(tiny_config(**OTHER)), **changes})
    with pytest.raises(ValueError, match=message) as error:
        case.inputs(dataclasses.replace(decoder(case), drafter=drafter))
    assert "\n" not in str(error.value)
