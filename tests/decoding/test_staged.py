"""A drafter with a drafter of its own: its chains, its cache, its law, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    DraftModel,
    Follow,
    Greedy,
    Rejection,
    Sample,
    Speculative,
    TokenRecycling,
    loop,
    options_of,
)
from parallax.decoding.base import Context
from parallax.decoding.drafters import Staged
from parallax.models import Block, Model
from parallax.testing import (
    CHECKS,
    Case,
    MarkovModel,
    check_cache,
    markov_law,
    p_value,
    reference_decode,
    sample_many,
    tiny_config,
    tiny_model,
)

LENGTH, SIZE = 3, 28                       # of drafts, and of what the reference reads
WARM = Sample(temperature=0.8, top_k=20)
KINDS = {"deterministic": (Greedy(), Follow()), "coupled": (WARM, Follow(sampler=WARM)),
         "sampled": (WARM, Rejection(sampler=WARM))}
OTHER = dict(vocab_size=5, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, scan_layers=False)
INNER = ("autoregressive", "prompt_lookup(min_ngram=1, draft_length=2)", "token_recycling(nodes=4, ranks=4)")


@pytest.fixture(scope="module")
def case():
    """A target of five tokens and an unlike draft model for it."""
    case = Case.tiny(vocab_size=5)
    _, draft = tiny_model(seed=1, **OTHER)
    return dataclasses.replace(case, params={**case.params, "draft": draft}, new_tokens=12)


def decoder(case, kind="deterministic", inner=INNER[2], **changes):
    sampler, verifier = KINDS[kind]
    drafter = Staged(**{"model": Model(tiny_config(**OTHER)), "sampler": sampler, "inner": inner, "kind": kind,
                        "draft_length": LENGTH, **changes})
    return Speculative(model=case.model, drafter=drafter, verifier=verifier, chunk=4)


@jax.jit
def _propose(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    return decoder.drafter.propose(params["draft"], state.own, ctx)


def steps(case, decoder):
    """(state in front of each step, unfinished rows, draft, drafter's state behind the draft, state behind the step)"""
    inputs = case.inputs(decoder)
    state = loop.prefill(inputs, case.capacity)
    while not np.asarray(state.done).all():
        before = jax.tree.map(jnp.copy, state)                             # the step takes the state's memory
        draft, own = _propose(inputs.decoder, inputs.params, before)
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        yield before, np.flatnonzero(~np.asarray(before.done)), draft, own, state


@pytest.mark.often("deterministic-token|sampled-prompt")
@pytest.mark.parametrize("kind, inner", [(kind, inner) for kind in KINDS for inner in INNER[kind != "deterministic":]])
def test_every_step_drafts_what_the_draft_model_alone_would_write_and_leaves_its_cache_in_order(kind, inner, case):
    ours = decoder(case, kind, inner)
    model, params, whole, forwards = ours.drafter.model, case.params["draft"], [], 0
    for before, rows, draft, own, after in steps(case, ours):
        assert (draft.kind, draft.depth, draft.parents, draft.certain) == (kind, LENGTH, (0, 0, 1, 2), True)
        assert np.asarray(draft.valid).all()
        tokens, length, drafted = map(np.asarray, (before.tokens, before.length, draft.tokens))
        longer = np.pad(tokens, ((0, 0), (0, LENGTH)))
        for b, end in enumerate(length):
            longer[b, end:end + LENGTH] = drafted[b, 1:]
        for b in rows:
            text = tokens[b, :length[b]].tolist()
            assert drafted[b, 0] == text[-1]
            if kind == "sampled":
                np.testing.assert_allclose(draft.logq[b], _law(model, params, text + drafted[b, 1:].tolist())[-4:-1],
                                           rtol=1e-3, atol=1e-3)
            else:
                sampler = jax.tree.map(jnp.float32, ours.verifier.sampler)
                alone = reference_decode(model, params, text, SIZE, sampler=sampler, seed=case.seed, row_id=int(b))
                assert text + drafted[b, 1:].tolist() == alone[:len(text) + LENGTH]
            whole.append(int(after.length[b]) - length[b] == LENGTH + 1)
            forwards += int(draft.forwards[b])
            assert own.cache.length[b] == length[b] + LENGTH - 1
            assert after.own.cache.length[b] == after.length[b] - 1 - 2 * whole[-1]
        check_cache(model, params, jnp.asarray(longer), own.cache)         # ahead of the text, along the draft
        check_cache(model, params, after.tokens, after.own.cache)          # and cut back to it
    assert any(whole) and not all(whole)
    alone = LENGTH * len(whole) + sum(whole)                # each row's last step is not followed by a catch-up
    assert (forwards <= alone) if inner == INNER[0] else (forwards < 0.95 * alone)


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


@pytest.mark.often("coupled")
@pytest.mark.parametrize("kind", ["deterministic", "coupled"])
def test_the_text_is_that_of_plain_decoding_and_of_the_plain_draft_model(kind, case):
    ours = decoder(case, kind)
    plain = dataclasses.replace(ours, drafter=DraftModel(model=ours.drafter.model, sampler=ours.drafter.sampler,
                                                         kind=kind, draft_length=LENGTH))
    result, alone = (loop.run(case.inputs(d), case.capacity) for d in (ours, plain))
    expected = case.reference(jax.tree.map(jnp.float32, ours.verifier.sampler))
    for row, end, text in zip(np.asarray(result.tokens), result.length, expected):
        assert row[:end].tolist() == text
    for name in ("emitted", "accepted", "proposed", "target_forwards", "accepted_at"):
        assert (getattr(result.info, name) == getattr(alone.info, name)).all(), name


@pytest.mark.often("coupled")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_batch(kind, case):
    CHECKS["batch_independence"](decoder(case, kind), case)


def test_a_drawn_draft_verified_by_rejection_leaves_the_targets_law():
    draw = np.random.default_rng(0)
    target, draft = (draw.normal(size=(3, 3)) * 1.2 for _ in range(2))
    model, params = MarkovModel.create(target)
    drafter = Staged(model=model, sampler=Sample(), kind="sampled", draft_length=2,
                     inner=TokenRecycling(nodes=3, ranks=3))
    ours = Speculative(model=model, drafter=drafter, verifier=Rejection(sampler=Sample()))
    samples = sample_many(ours, {"target": params, "draft": MarkovModel.create(draft)[1]}, [0, 1], 4, 20_000)
    law = np.exp(target) / np.exp(target).sum(1, keepdims=True)
    assert p_value(samples, markov_law(law, 1, 4)) > 1e-3


def test_nothing_is_drafted_where_the_draft_models_positions_end(case):
    model, params = tiny_model(seed=1, **{**OTHER, "positions": "learned", "max_positions": 16})
    short = dataclasses.replace(case, params={**case.params, "draft": params})
    for before, rows, draft, _, after in steps(short, decoder(case, model=model)):
        assert not draft.certain
        length, valid = np.asarray(before.length), np.asarray(draft.valid)
        for b in rows:                                                     # node d is drawn at length - 2 + d
            assert valid[b].tolist() == [True, *(length[b] - 2 + np.arange(1, LENGTH + 1) < 16).tolist()]
        final = after.tokens, after.length
    for row, end, text in zip(*map(np.asarray, final), case.reference(Greedy())):
        assert row[:end].tolist() == text


def test_the_inner_drafter_may_be_a_draft_model_too(case):
    """Three models: the smallest drafts for the middle one, which drafts for the target."""
    inside = DraftModel(model=Model(tiny_config(**OTHER)), draft_length=2)
    ours = decoder(case, inner=inside)
    _, smallest = tiny_model(seed=2, **OTHER)
    nested = dataclasses.replace(case, params={"target": case.params["target"],
                                               "draft": {"target": case.params["draft"], "draft": smallest}})
    for before, rows, draft, _, after in steps(nested, ours):
        tokens, length = np.asarray(before.tokens), np.asarray(before.length)
        check_cache(inside.model, smallest, after.tokens, after.own.own.cache)
        for b in rows:
            text = tokens[b, :length[b]].tolist()
            alone = reference_decode(inside.model, case.params["draft"], text, SIZE)
            assert text + np.asarray(draft.tokens)[b, 1:].tolist() == alone[:len(text) + LENGTH]


def test_its_options_are_a_length_and_the_text_of_its_own_drafter(case):
    assert options_of("staged") == {"inner": "prompt_lookup(draft_length=3)", "draft_length": 4}
    assert decoder(case).drafter.inner == TokenRecycling(nodes=4, ranks=4)


@pytest.mark.parametrize("changes, message", [
    (dict(draft_length=0), "draft_length must be at least 1, got 0"),
    (dict(kind="random"), "kind must be .* got 'random'"),
    (dict(inner="prompt_look"), "unknown inner drafter 'prompt_look': expected one of autoregressive, .*did you mean"),
    (dict(inner="draft_model"), "unknown inner drafter 'draft_model'"),
    (dict(inner="token_recycling(nodes=0)"), "nodes must be at least 1, got 0"),
    (dict(model=Model(tiny_config(**{**OTHER, "vocab_size": 6}))), "expected 5 tokens, got 6"),
    (dict(model=Model(tiny_config(**OTHER, visibility="full"))), "needs a causal model"),
    (dict(kind="sampled"), "a sampled draft needs a sampler with a temperature"),
])
def test_what_does_not_fit_is_refused_in_one_line(changes, message, case):
    with pytest.raises(ValueError, match=message) as error:
        drafter = Staged(**{"model": Model(tiny_config(**OTHER)), **changes})
        case.inputs(dataclasses.replace(decoder(case), drafter=drafter))
    assert "\n" not in str(error.value)
