"""Prompt lookup against a search that looks everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import PromptLookup
from parallax.decoding.base import Context

WIDTH = 14
OPTIONS = [dict(), dict(prefer="first"), dict(max_ngram=1), dict(max_ngram=4, min_ngram=3, draft_length=2),
           dict(min_ngram=2, prefer="first", draft_length=1)]


def lookup(**options):
    """With one token enough for a match, so that short texts have some."""
    return PromptLookup(**{"max_ngram": 3, "min_ngram": 1, **options})


def search(text, max_ngram=3, min_ngram=1, prefer="last", **_):
    """(where the best earlier copy of the end of the text ends, its length), or (-1, 0)."""
    for size in range(max_ngram, min_ngram - 1, -1):
        ends = [end for end in range(size - 1, len(text) - 1) if text[end - size + 1:end + 1] == text[-size:]]
        if ends:
            return ends[-1] if prefer == "last" else ends[0], size
    return -1, 0


def _batch(texts):
    """Texts in one array, with leftovers behind their ends that must not be read."""
    tokens = np.full((len(texts), WIDTH), texts[0][-1], np.int32)
    for row, text in zip(tokens, texts):
        row[:len(text)] = text
    return tokens, np.asarray([len(text) for text in texts], np.int32)


@functools.cache
def _compiled(**options):
    drafter = lookup(**options)

    def both(tokens, length):
        context = Context(None, None, tokens, length, None, None)
        return drafter.find(tokens, length), drafter.propose(None, (), context)[0]

    return jax.jit(both)


@pytest.mark.parametrize("options", OPTIONS)
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3))
def test_finds_and_copies_what_a_plain_search_does(options, texts):
    tokens, length = _batch(texts)
    (found, match), draft = _compiled(**options)(tokens, length)
    assert list(zip(found.tolist(), match.tolist())) == [search(text, **options) for text in texts]
    assert draft.match.tolist() == match.tolist()
    for b, text in enumerate(texts):
        end = found[b]
        copied = text[end + 1:end + 1 + lookup(**options).draft_length] if end >= 0 else []
        assert draft.valid[b].tolist() == [True] * (1 + len(copied)) + [False] * (draft.depth - len(copied))
        assert draft.tokens[b, :1 + len(copied)].tolist() == [text[-1], *copied]


@pytest.mark.parametrize("text, options, draft", [
    ([7], {}, []),                                                        # nothing before the only token
    ([1, 2, 3], {}, []),                                                  # no copy: never the end itself
    ([4, 4], {}, [4]),                                                    # the copy may overlap the end
    ([1, 2, 9, 1, 2], {}, [9, 1, 2]),                                     # cut at the end of the text
    ([1, 2, 9, 1, 2], dict(draft_length=2), [9, 1]),
    ([1, 2, 8, 5, 2, 9, 1, 2], dict(draft_length=1), [8]),                # the longer match wins over the later one
    ([1, 2, 8, 5, 2, 9, 1, 2], dict(draft_length=1, max_ngram=1), [9]),
    ([2, 8, 2, 9, 2], dict(draft_length=1, prefer="first"), [8]),
    ([2, 8, 2, 9, 2], dict(draft_length=1), [9]),
    ([2, 8, 2, 9, 2], dict(min_ngram=2), []),
])
def test_drafts_of_short_texts(text, options, draft):
    ours = _compiled(**options)(*_batch([text]))[1]
    assert ours.tokens[0][np.asarray(ours.valid[0])].tolist() == [text[-1], *draft]


def test_a_draft_is_a_chain_that_cost_nothing():
    draft = _compiled(draft_length=2)(*_batch([[1, 2, 1]]))[1]
    assert (draft.parents, draft.depth, draft.kind, draft.forwards, draft.rows) == ((0, 0, 1), 2, "deterministic", 0, 0)
    assert PromptLookup(draft_length=2).depth == 2


@pytest.mark.parametrize("options, message", [
    (dict(min_ngram=0), "1 <= min_ngram <= max_ngram, got 0 and 4"),
    (dict(min_ngram=5), "got 5 and 4"),
    (dict(max_ngram=0), "got 2 and 0"),
    (dict(draft_length=0), "draft_length must be at least 1, got 0"),
    (dict(prefer="best"), "'last' or 'first', got 'best'"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(**options)


def test_a_long_text_is_searched_as_well():
    drafter = PromptLookup(max_ngram=8)
    tokens = jnp.zeros((1, 1 << 17), jnp.int32).at[0, 5].set(1).at[0, -1].set(1)
    assert [int(x[0]) for x in drafter.find(tokens, jnp.asarray([1 << 17]))] == [5, 6]
