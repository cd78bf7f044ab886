"""A chain that is drafted by copying, and a copied branch beside it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    Double,
    Greedy,
    PromptLookup,
    Sample,
    Staged,
    TokenRecycling,
    check_settings,
    loop,
    make_decoder,
    options_of,
)
from parallax.decoding.base import Context
from parallax.testing import Case, check_cache, tiny_model

OTHER = dict(vocab_size=5, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
OPTIONS = dict(draft_length=3, inner="autoregressive", retrieval="prompt_lookup(min_ngram=1, draft_length=3)")


@pytest.fixture(scope="module")
def case():
    case = Case.tiny(vocab_size=5)
    _, draft = tiny_model(seed=1, **OTHER)
    return dataclasses.replace(case, params={**case.params, "draft": draft}, new_tokens=12)


def paths(draft, b):
    result = {0: ()}
    for n in range(1, draft.tokens.shape[1]):
        parent = int(np.broadcast_to(draft.parents, draft.tokens.shape)[b, n])
        if draft.valid[b, n] and parent in result:
            result[n] = (*result[parent], int(draft.tokens[b, n]))
    return sorted(result.values())


@pytest.mark.often("sampled")
@pytest.mark.parametrize("sampler", [Greedy(), Sample(temperature=0.8)], ids=["greedy", "sampled"])
def test_every_draft_is_the_union_of_what_both_sides_would_draft_alone(sampler, case):
    model = tiny_model(seed=1, **OTHER)[0]
    ours = make_decoder("double", case.model, draft=model, sampler=sampler, **OPTIONS)
    assert ours.drafter.kind == ("deterministic" if sampler == Greedy() else "coupled")

    @jax.jit
    def drafts(decoder, params, state):
        ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
        own, drafter = state.own, decoder.drafter
        return (drafter.propose(params["draft"], own, ctx)[0], drafter.staged.propose(params["draft"], own[0], ctx)[0],
                drafter.retrieval.propose(None, own[1], ctx)[0])

    inputs = case.inputs(ours)
    state, differ = loop.prefill(inputs, case.capacity), 0
    while not np.asarray(state.done).all():
        both, chain, copied = drafts(inputs.decoder, inputs.params, state)
        assert both.tokens.shape == (3, 7) and both.depth == 3 and both.kind == chain.kind
        for b in np.flatnonzero(~np.asarray(state.done)):
            assert paths(both, b) == sorted(set(paths(chain, b)) | set(paths(copied, b)))
            differ += len(paths(both, b)) > 4
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        check_cache(model, case.params["draft"], state.tokens, state.own[0].cache)
    assert differ
    expected = case.reference(jax.tree.map(jnp.float32, sampler))
    for row, end, text in zip(np.asarray(state.tokens), state.length, expected):
        assert row[:end].tolist() == text


def test_its_options_are_texts_of_two_drafters():
    assert options_of("double") == {"inner": "prompt_lookup(draft_length=3)", "draft_length": 4,
                                    "retrieval": "prompt_lookup(draft_length=4)"}
    drafter = Double(model=None, inner="token_recycling(nodes=3)", retrieval="prompt_lookup(draft_length=6)")
    assert drafter.staged == Staged(model=None, inner=TokenRecycling(nodes=3))
    assert drafter.retrieval == PromptLookup(draft_length=6) and drafter.depth == 6


@pytest.mark.parametrize("options, message", [
    (dict(draft_length=0), "draft_length must be at least 1"),
    (dict(retrieval="prompt"), "unknown inner drafter 'prompt'"),
    (dict(inner="double"), "unknown inner drafter 'double'"),
])
def test_what_does_not_fit_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        check_settings("double", options, draft=True)
    assert "\n" not in str(error.value)


def test_a_rule_that_needs_a_law_refuses_it():
    with pytest.raises(ValueError, match="needs drafts with a known law, and those of 'double' have none"):
        check_settings("double", {}, verifier="rejection", draft=True)
