"""Choosing between two drafts by the length of the match."""

import jax
import numpy as np
import pytest

from parallax.decoding import (
    AdaptiveNgram,
    Combined,
    Draft,
    DraftModel,
    InputGuided,
    NgramPool,
    PromptLookup,
    SuffixMatch,
    TokenRecycling,
    combine,
    make_decoder,
    tree,
)
from parallax.models import Model
from parallax.testing import CHECKS, Case, tiny_config
from parallax.testing.feed import feed

TEXTS = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 1, 2], [7, 1, 2]]


def moments(drafter, texts=TEXTS):
    prompts, counts = [len(text) for text in texts], np.ones((1, len(texts)), int)
    return next(feed(drafter, texts, prompts, counts, vocabulary=10, capacity=16))


def paths(draft, b):
    """The token paths of a row's valid nodes."""
    parents = np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[b]
    found = [()]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], int(draft.tokens[b, node])))
    return {path for path, valid in zip(found[1:], np.asarray(draft.valid)[b, 1:]) if valid}


def test_each_sequence_gets_the_draft_of_its_own_match():
    first, second = SuffixMatch(draft_length=3), NgramPool(ngram=3, branches=2)
    ours, left, right = (moments(d).draft for d in (Combined(first=first, second=second, threshold=3), first, second))
    assert left.match.tolist() == [5, 2, 0]
    assert [paths(ours, b) for b in range(3)] == [paths(left, 0), paths(right, 1), paths(right, 2)]
    assert [len(paths(ours, b)) for b in range(3)] == [3, 2, 0]
    assert (ours.match.tolist(), ours.depth, ours.tokens.shape) == ([5, 0, 0], 3, (3, 5))
    other = moments(Combined(first=first, second=second, threshold=2)).draft
    assert paths(other, 1) == paths(left, 1) != paths(right, 1)


def test_padded_nodes_are_no_drafts_and_costs_add_up():
    chain = Draft(np.asarray([[1, 2]]), (0, 0), np.ones((1, 2), bool), depth=1, match=np.asarray([1]), forwards=2,
                  rows=3)
    wide = Draft(np.asarray([[1, 3, 4, 5]]), (0, 0, 1, 0), np.ones((1, 4), bool), depth=2, rows=4)
    for flag, valid, parents, match in (([True], [1, 1, 0, 0], [0, 0, 0, 0], 1), ([False], [1] * 4, [0, 0, 1, 0], 0)):
        ours = jax.jit(combine.choose)(np.asarray(flag), chain, wide)
        assert (ours.valid[0].tolist(), ours.parents[0].tolist()) == (valid, parents)
        assert (ours.depth, int(ours.match[0]), ours.forwards, ours.rows) == (2, match, 2, 7)
        assert tree.depths(ours.parents, ours.depth)[0].tolist() == [0 if p == i == 0 else 1 + (i == 2 and p == 1)
                                                                     for i, p in enumerate(parents)]
    with pytest.raises(ValueError, match="only deterministic drafts can be chosen from, got a sampled one"):
        combine.choose(np.asarray([True]), chain, wide.replace(kind="sampled"))


def test_parts_are_named_by_text_or_given_as_objects():
    drafter = Combined(first="prompt_lookup(draft_length=4)", second="ngram_pool(branches=3)")
    assert (drafter.first, drafter.second) == (PromptLookup(draft_length=4), NgramPool(branches=3))
    assert drafter == Combined(first=PromptLookup(draft_length=4), second=NgramPool(branches=3))
    assert Combined() == Combined(first=SuffixMatch(), second=TokenRecycling(), threshold=5)
    assert jax.tree.unflatten(*reversed(jax.tree.flatten(Combined()))) == Combined()
    for first in (AdaptiveNgram(), InputGuided()):
        assert moments(Combined(first=first, second=PromptLookup())).draft.depth == 7


def test_going_back_goes_back_in_both():
    class Noted(PromptLookup):
        def rewind(self, params, own, ctx):
            return "back"

    assert Combined(first=Noted(), second=Noted()).rewind(None, ((), ()), None) == ("back", "back")


def test_one_may_stand_inside_another():
    case = Case.tiny()
    decoder = make_decoder("combined", case.model, second="combined(second='ngram_pool')", threshold=2)
    CHECKS["equals_plain_decoding"](decoder, case)


@pytest.mark.parametrize("options, message", [
    (dict(threshold=0), "threshold must be at least 1, got 0"),
    (dict(first="suffix_math"), "unknown drafter 'suffix_math'.*did you mean"),
    (dict(first="draft_model"), "unknown drafter 'draft_model'"),
    (dict(second="ngram_pool(branches=0)"), "branches must be at least 1, got 0"),
    (dict(first="token_recycling"), "first must be a drafter that states its match, one of prompt_lookup.*Recycling"),
])
def test_parts_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Combined(**options)


def test_drawn_drafts_are_refused():
    model = Model(tiny_config())
    with pytest.raises(ValueError, match="takes drafters of deterministic drafts, got DraftModel with coupled ones"):
        Combined(second=DraftModel(model=model, kind="coupled")).check(model)
