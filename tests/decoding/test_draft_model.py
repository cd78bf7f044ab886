"""The draft model's chains, its cache, and what it refuses, against the cache-free reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    METHODS,
    DraftModel,
    Follow,
    Greedy,
    Rejection,
    Sample,
    check_settings,
    loop,
    make_decoder,
    options_of,
)
from parallax.decoding.base import Context
from parallax.models import Block, Model
from parallax.testing import Case, check_cache, reference_decode, tiny_config, tiny_model

LENGTH, SIZE = 3, 28                       # of drafts, and of what the reference reads
WARM = Sample(temperature=0.8, top_k=20)
KINDS = {"deterministic": dict(), "coupled": dict(sampler=WARM), "sampled": dict(sampler=WARM, verifier="rejection")}
# Another shape than the target's, with unrolled layers. Few tokens, so that two unlike models agree now and then.
OTHER = dict(vocab_size=5, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, scan_layers=False)


@pytest.fixture(scope="module")
def case():
    """A target of five tokens and an unlike draft model for it."""
    case = Case.tiny(vocab_size=5)
    _, draft = tiny_model(seed=1, **OTHER)
    return dataclasses.replace(case, params={**case.params, "draft": draft}, new_tokens=12)


def decoder(case, kind="deterministic", **changes):
    settings = dict(draft=Model(tiny_config(**OTHER)), draft_length=LENGTH)
    return make_decoder("draft_model", case.model, **{**settings, **KINDS[kind], **changes})


@jax.jit
def _propose(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    return decoder.drafter.propose(params["draft"], state.own, ctx)[0]


def steps(case, decoder, limits=None):
    """(state in front of each step, unfinished rows, what the step counted, state behind it)."""
    inputs = case.inputs(decoder, limits=limits)
    state = loop.prefill(inputs, case.capacity)
    while not np.asarray(state.done).all():
        before = jax.tree.map(jnp.copy, state)                             # the step takes the state's memory
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        yield before, np.flatnonzero(~np.asarray(before.done)), info, state


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_drafts_what_the_draft_model_alone_would_write_and_leaves_its_cache_in_order(kind, case):
    ours = dataclasses.replace(decoder(case, kind), chunk=4)
    model, params, inputs = ours.drafter.model, case.params["draft"], case.inputs(ours)
    state = loop.prefill(inputs, case.capacity)
    assert state.own.cache.length.tolist() == [len(prompt) - 1 for prompt in case.prompts]
    check_cache(model, params, state.tokens, state.own.cache)
    whole = []
    for before, rows, info, after in steps(case, ours):
        draft = _propose(inputs.decoder, inputs.params, before)
        assert (draft.kind, draft.depth, draft.parents, draft.certain) == (kind, LENGTH, (0, 0, 1, 2), True)
        assert np.asarray(draft.valid).all() and (draft.logq is None) == (kind != "sampled")
        draft, tokens, length = jax.tree.map(np.asarray, (draft, before.tokens, before.length))
        for b in rows:
            text, drafted = tokens[b, :length[b]].tolist(), draft.tokens[b].tolist()
            assert drafted[0] == text[-1]
            if kind == "sampled":
                np.testing.assert_allclose(draft.logq[b], _law(model, params, text + drafted[1:])[len(text) - 1:-1],
                                           rtol=1e-3, atol=1e-3)
                assert np.isfinite(draft.logq[b][np.arange(LENGTH), drafted[1:]]).all()
            else:
                alone = reference_decode(model, params, text, SIZE, sampler=inputs.decoder.verifier.sampler,
                                         seed=case.seed, row_id=int(b))
                assert text + drafted[1:] == alone[:len(text) + LENGTH]
        check_cache(model, params, after.tokens, after.own.cache)
        emitted, length, cached = map(np.asarray, (info.emitted, after.length, after.own.cache.length))
        for b in rows:                                                     # the last token of a draft never went in
            whole.append(emitted[b] == LENGTH + 1)
            assert cached[b] == length[b] - 1 - whole[-1]
    assert any(whole) and not all(whole)


def _law(model, params, tokens):
    """Log-probabilities behind every token, as WARM warps them."""
    if model not in _LAWS:
        def law(params, tokens):
            block = Block(tokens, jnp.arange(SIZE)[None], jnp.tril(jnp.ones((SIZE, SIZE), bool)))
            hidden = model.forward(params, block, model.new_cache(1, 0)).hidden
            return jax.nn.log_softmax(WARM.warp(model.unembed(params, hidden)), -1)[0]
        _LAWS[model] = jax.jit(law)
    padded = np.zeros((1, SIZE), np.int32)
    padded[0, :len(tokens)] = tokens
    return np.asarray(_LAWS[model](params, padded))[:len(tokens)]


_LAWS: dict = {}


def test_a_drafters_cache_that_is_exactly_full_is_not_overwritten(case):
    full = dataclasses.replace(case, new_tokens=4)
    ours = dataclasses.replace(decoder(case), chunk=1)                     # so that the draft decides about the room
    for _, _, _, state in steps(full, ours, limits=[full.capacity] * 3):
        check_cache(ours.drafter.model, full.params["draft"], state.tokens, state.own.cache)
    assert state.length.tolist() == [full.capacity] * 3
    assert state.own.cache.capacity == full.capacity + LENGTH + 1


def test_a_draft_of_one_token_leaves_the_text_alone(case):
    ours = decoder(case, draft_length=1)
    assert ours.depth == 1
    result = loop.run(case.inputs(ours), case.capacity)
    for row, end, text in zip(np.asarray(result.tokens), result.length, case.reference(Greedy())):
        assert row[:end].tolist() == text
    assert (result.info.draft_forwards == result.info.target_forwards).all()
    assert (result.info.draft_rows == 2 * result.info.target_forwards).all()


def test_nothing_is_drafted_where_the_draft_models_positions_end(case):
    model, params = tiny_model(seed=1, **{**OTHER, "positions": "learned", "max_positions": 16})
    short = dataclasses.replace(case, params={**case.params, "draft": params})
    ours = decoder(case, draft=model)
    inputs = short.inputs(ours)
    for before, rows, info, after in steps(short, ours):
        draft = _propose(inputs.decoder, inputs.params, before)
        assert not draft.certain
        draft, length, info, last = jax.tree.map(np.asarray, (draft, before.length, info, after[:2]))
        for b in rows:                                                     # node d is drawn at length - 2 + d
            known = length[b] - 2 + np.arange(1, LENGTH + 1) < 16
            assert draft.valid[b].tolist() == [True, *known.tolist()]
            assert info.proposed[b] == known.sum()
    for row, end, text in zip(*last, case.reference(Greedy())):
        assert row[:end].tolist() == text


def test_options_and_parts_are_told_apart():
    assert options_of("draft_model") == {"draft_length": 4, "tree": "", "controller": "constant"}
    assert METHODS["draft_model"].needs_draft and not METHODS["prompt_lookup"].needs_draft
    with pytest.raises(ValueError, match="'draft_model' has no option 'kind': expected one of draft_length, tr"):
        check_settings("draft_model", {"kind": "sampled"}, draft=True)


def test_the_verifier_and_the_sampler_decide_how_drafts_are_drawn(case):
    for kind, guarantee, verifier in (("deterministic", "exact", Follow), ("coupled", "exact", Follow),
                                      ("sampled", "distribution", Rejection)):
        ours = decoder(case, kind)
        assert (ours.drafter.kind, ours.guarantee, type(ours.verifier)) == (kind, guarantee, verifier)
        assert ours.drafter.sampler == ours.verifier.sampler


@pytest.mark.parametrize("changes, message", [
    (dict(vocab_size=6), "expected 5 tokens, got 6; use a draft with the target's tokenizer"),
    (dict(alignment="same"), r"write left to right \(alignment 'shifted', visibility 'causal'\), got 'same' and"),
    (dict(visibility="full"), "got 'shifted' and 'full'"),
])
def test_draft_models_that_do_not_fit_are_refused_before_anything_compiles(changes, message, case, monkeypatch):
    draft = Model(tiny_config(**{**OTHER, **changes}))
    with pytest.raises(ValueError, match=message):
        decoder(case, draft=draft)
    monkeypatch.setattr(loop, "run", None)
    with pytest.raises(ValueError, match=message):
        case.inputs(dataclasses.replace(decoder(case), drafter=DraftModel(model=draft)))


@pytest.mark.parametrize("name, settings, message", [
    ("draft_model", dict(), r"'draft_model' needs a draft model: give one with the target's tokenizer .*--draft"),
    ("prompt_lookup", dict(draft=True), "'prompt_lookup' uses no draft model, but one was given: expected .*draft_m"),
    ("draft_model", dict(verifier="reject"), "unknown verifier 'reject': expected one of follow, rejection.*; did you"),
    ("prompt_lookup", dict(verifier="rejection"), "of 'prompt_lookup' have none: expected method draft_model.*, or"),
    ("autoregressive", dict(verifier="rejection"), "of 'autoregressive' have none"),
    ("draft_model", dict(options=dict(draft_length=0), draft=True), "draft_length must be at least 1, got 0"),
    ("draft_model", dict(options=dict(length=3), draft=True), "has no option 'length': expected one of draft_length"),
])
def test_settings_that_do_not_go_together_are_refused_without_a_model(name, settings, message, case):
    with pytest.raises(ValueError, match=message) as error:
        check_settings(name, **{"options": {}, **settings})
    assert "\n" not in str(error.value)
    options = settings.pop("options", {})
    draft = dict(draft=case.model) if settings.pop("draft", False) else {}
    with pytest.raises(ValueError, match=message):
        make_decoder(name, case.model, **settings, **draft, **options)


def test_the_drafters_own_fields_are_checked(case):
    with pytest.raises(ValueError, match="kind must be .* got 'random'"):
        DraftModel(model=case.model, kind="random")
    with pytest.raises(ValueError, match="a sampled draft needs a sampler with a temperature, got Greedy"):
        DraftModel(model=case.model, kind="sampled").check(case.model)
    without = dataclasses.replace(case, params={"target": case.params["target"]})
    with pytest.raises(ValueError, match="params has no 'draft'"):
        loop.prefill(without.inputs(decoder(case)), case.capacity)
