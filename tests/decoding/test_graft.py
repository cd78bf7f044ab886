"""A pruned tree with branches from the text, against a search in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, Graft, Greedy, Shape, check_settings, loop, make_decoder, options_of
from parallax.decoding.base import Context
from parallax.testing import Case, check_cache

TREE = Shape.paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 0, 1)])
GRAFT = Graft(model=None, tree="levels(2, 2, 2)", branches=2, branch_length=2, max_ngram=3)


def paths(draft, b):
    result = {0: ()}
    for n in range(1, draft.tokens.shape[1]):
        parent = int(np.broadcast_to(draft.parents, draft.tokens.shape)[b, n])
        if draft.valid[b, n] and parent in result:
            result[n] = (*result[parent], int(draft.tokens[b, n]))
    return result


def text_of(tokens, lengths):
    ones = jnp.zeros((len(tokens),), jnp.int32)
    return Context(None, None, jnp.asarray(tokens), jnp.asarray(lengths), None, ones)


def search(text, path, graft):
    """(longest match of the text and the path, what is behind it), the last of equals."""
    whole, best = [*text, *path], (0, ())
    for end in range(len(text) - 1):
        size = 0
        while size < min(graft.max_ngram, end + 1) and text[end - size] == whole[-1 - size]:
            size += 1
        if size >= max(best[0], graft.min_ngram):
            best = size, tuple(text[end + 1:end + 1 + graft.branch_length])
    return best


def expected(text, tree, order, graft):
    """The paths of the draft: `tree` has the paths of the model's tree, best first in `order`."""
    keep = len(order) - graft.branches * graft.branch_length
    kept = [()] + sorted(order[:keep], key=list(tree.values()).index)
    found = []
    for place, path in enumerate(kept):
        size, behind = search(text, path, graft)
        if size and (*path, behind[0]) not in kept:
            found.append((-size, place, path, behind))
    result = set(kept)
    for _, _, path, behind in sorted(found)[:graft.branches]:
        result |= {path + behind[:end] for end in range(1, len(behind) + 1)}
    for path in order[keep:]:
        if len(result) <= len(order):
            result.add(path)
    return result


@pytest.mark.parametrize("scored", [False, True])
def test_the_best_nodes_stay_and_the_longest_matches_are_grafted_on(scored):
    draw = np.random.default_rng(0)
    rows, slots, size = 40, 24, len(TREE.parents)
    tokens = draw.integers(0, 3, (rows, slots))
    lengths = draw.integers(1, slots + 1, rows)
    drafted = draw.integers(0, 3, (rows, size))
    drafted[:, 0] = tokens[np.arange(rows), lengths - 1]
    for n in range(1, size):                                     # siblings differ, as those of a beam
        twins = [m for m in range(1, n) if TREE.parents[m] == TREE.parents[n]]
        drafted[:, n] = (drafted[:, twins[0]] + 1) % 3 if twins else drafted[:, n]
    scores = np.zeros((rows, size), np.float32)
    for n in range(1, size):
        scores[:, n] = scores[:, TREE.parents[n]] - draw.random(rows) - 0.01
    draft = Draft(jnp.asarray(drafted), TREE.parents, jnp.ones((rows, size), bool), depth=3,
                  scores=jnp.asarray(scores) if scored else None, forwards=3, rows=5)
    grown = jax.jit(lambda ctx: GRAFT.grafted(draft, ctx))(text_of(tokens, lengths))
    assert grown.tokens.shape == (rows, size) and grown.depth == 5 and grown.kind == "deterministic"
    assert (grown.forwards, grown.rows) == (3, 5)
    grafted = 0
    for b in range(rows):
        tree = paths(draft, b)
        by = -scores[b] if scored else np.asarray(TREE.depths)
        order = [tree[n] for n in sorted(range(1, size), key=lambda n: (by[n], n))]
        ours = list(paths(grown, b).values())
        assert len(set(ours)) == len(ours), "a path is there twice"
        assert set(ours) == expected(tokens[b, :lengths[b]].tolist(), tree, order, GRAFT)
        grafted += set(ours) != set(tree.values())
    assert grafted > 5


def test_without_a_match_the_draft_is_the_tree():
    size = len(TREE.parents)
    draft = Draft(jnp.asarray([[9, *range(size - 1)]]), TREE.parents, jnp.ones((1, size), bool), depth=3)
    same = GRAFT.grafted(draft, text_of([[7, 8, 9, 0, 0]], [3]))
    assert sorted(paths(same, 0).values()) == sorted(paths(draft, 0).values())


def test_the_text_is_that_of_plain_decoding_and_the_drafts_cache_is_in_order():
    case = Case.tiny(vocab_size=3)                               # a text that repeats itself
    weights = case.params["target"]                               # always right, so that what lies deeper is reached
    case = dataclasses.replace(case, params={**case.params, "draft": weights})
    ours = make_decoder("graft", case.model, draft=case.model, tree="beam(width=2, depth=2, nodes=6)", branches=1,
                        branch_length=3, min_ngram=1)
    inputs = case.inputs(ours)
    state, deep = loop.prefill(inputs, case.capacity), 0
    while not np.asarray(state.done).all():
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        check_cache(case.model, weights, state.tokens, state.own.cache)
        deep += int(info.accepted_at[:, 2:].sum())                # deeper than the tree: copied
        assert (info.proposed <= 6).all()
    assert deep
    for row, end, text in zip(np.asarray(state.tokens), state.length, case.reference(Greedy())):
        assert row[:end].tolist() == text


def test_its_options():
    assert options_of("graft") == {"tree": "beam(width=4, depth=4, nodes=15)", "branches": 2, "branch_length": 4,
                                   "max_ngram": 6, "min_ngram": 2}


@pytest.mark.parametrize("options, message", [
    (dict(branches=0), "branches must be at least 1, got 0"),
    (dict(branch_length=0), "branch_length must be at least 1"),
    (dict(min_ngram=0), "expected 1 <= min_ngram <= max_ngram, got 0 and 6"),
    (dict(tree="beam(width=2, depth=2, nodes=6)", branches=3, branch_length=2), "leave nothing of a tree of 6 nodes"),
    (dict(tree="bean"), "unknown tree 'bean'"),
])
def test_what_does_not_fit_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        check_settings("graft", options, draft=True)
    assert "\n" not in str(error.value)
