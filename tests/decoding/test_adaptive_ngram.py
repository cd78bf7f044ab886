"""Adaptive n-grams against counts kept in plain Python."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import AdaptiveNgram
from parallax.testing.feed import feed

WIDTH = 18


def oracle(text, max_ngram=5, min_ngram=2, draft_length=7):
    """(draft, length of the context of its first token)."""
    drafted, match = [], 0
    while len(drafted) < draft_length:
        context = [*text, *drafted]
        for size in range(min(max_ngram, len(context)), min_ngram - 1, -1):
            ends = [end for end in range(size, len(text)) if text[end - size:end] == context[-size:]]
            if ends:
                break
        else:
            return drafted, match
        match = match or size
        counts = collections.Counter(text[end] for end in ends)
        latest = {text[end]: end for end in ends}
        drafted.append(max(counts, key=lambda token: (counts[token], latest[token])))
    return drafted, match


def once(drafter, texts, vocabulary=10, capacity=WIDTH):
    counts = np.ones((1, len(texts)), int)
    return next(feed(drafter, texts, [len(t) for t in texts], counts, vocabulary=vocabulary, capacity=capacity))


@pytest.mark.parametrize("options", [dict(min_ngram=1), dict(max_ngram=2), dict(max_ngram=3, draft_length=2),
                                     dict(max_ngram=1, min_ngram=1)])
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3))
def test_drafts_what_plain_counting_finds(options, texts):
    moment = once(AdaptiveNgram(**options), texts)
    for b, text in enumerate(texts):
        assert (moment.row(b), int(moment.draft.match[b])) == oracle(text, **options)


@pytest.mark.parametrize("text, options, draft", [
    ([7], {}, []),
    ([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2], dict(draft_length=1, max_ngram=2), [5]),       # twice 5, once 6
    ([1, 2, 5, 1, 2, 6, 1, 2], dict(draft_length=1, max_ngram=2), [6]),                # once each: the latest
    ([3, 1, 2, 5, 8, 1, 2, 6, 8, 1, 2, 6, 3, 1, 2], dict(draft_length=1), [5]),        # 3 1 2 beats the more frequent
    ([9, 1, 2, 3, 9, 2, 3, 4, 1, 2], dict(draft_length=3), [3, 9, 2]),                 # goes on over what it drafted
    ([4, 4, 4], dict(draft_length=4), [4, 4, 4, 4]),
    ([1, 2, 1], {}, []),                                                               # one token is too little
    ([1, 2, 1], dict(min_ngram=1, draft_length=1), [2]),
])
def test_drafts_of_short_texts(text, options, draft):
    assert once(AdaptiveNgram(**options), [text]).row(0) == draft


def test_a_draft_is_a_chain_that_cost_nothing():
    drafter = AdaptiveNgram(draft_length=2)
    draft = once(drafter, [[1, 2, 1, 2]]).draft
    assert (draft.parents, draft.depth, draft.kind, draft.forwards, draft.rows) == ((0, 0, 1), 2, "deterministic", 0, 0)
    assert drafter.depth == 2


@pytest.mark.parametrize("options, message", [
    (dict(min_ngram=0), "1 <= min_ngram <= max_ngram, got 0 and 5"), (dict(min_ngram=6), "got 6 and 5"),
    (dict(draft_length=0), "draft_length must be at least 1, got 0"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveNgram(**options)
