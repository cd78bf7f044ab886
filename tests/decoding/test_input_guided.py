"""Input-guided drafts against a search in the prompt, and against the paper's pointer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import InputGuided
from parallax.testing.feed import feed, rewound

WIDTH = 20


def anchor(source, output, min_match=1):
    """Place behind the only place of the longest end of the output that the source has, and its length."""
    for size in range(min(len(source), len(output)), min_match - 1, -1):
        ends = [end for end in range(size, len(source) + 1) if source[end - size:end] == output[-size:]]
        if ends:
            return (ends[0], size) if len(ends) == 1 else (None, 0)
    return None, 0


def oracle(source, output, draft_length=7, min_match=1):
    """(draft, match) by looking everywhere in the source."""
    pointer, match = anchor(source, output, min_match)
    draft = [] if pointer is None else source[pointer:pointer + draft_length]
    return draft, match if draft else 0


def along(drafter, texts, prompts, seed=0):
    counts = np.random.default_rng(seed).integers(1, 5, (8, len(texts)))
    return feed(drafter, texts, prompts, counts, vocabulary=10, capacity=WIDTH)


@pytest.mark.parametrize("options", [dict(), dict(min_match=2, draft_length=3)])
@settings(deadline=None, max_examples=25)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=WIDTH), min_size=3, max_size=3),
       seed=st.integers(0, 99))
def test_drafts_what_a_plain_search_in_the_prompt_finds(options, texts, seed):
    drafter = InputGuided(**options)
    prompts = [max(1, len(text) * 2 // 3) for text in texts]
    moments = list(along(drafter, texts, prompts, seed))
    for moment in moments:
        for b, end in enumerate(np.asarray(moment.ctx.length)):
            wanted = oracle(texts[b][:prompts[b]], texts[b][prompts[b]:end], **options)
            assert (moment.row(b), int(moment.draft.match[b])) == wanted
    first, last = moments[len(moments) // 2], moments[-1]
    again = rewound(drafter, last, first)
    for b in range(len(texts)):
        assert (again.row(b), again.draft.match[b]) == (first.row(b), first.draft.match[b])


@settings(deadline=None, max_examples=300)
@given(source=st.lists(st.integers(0, 4), min_size=1, max_size=12), output=st.lists(st.integers(0, 4), max_size=12))
def test_the_search_finds_the_pointer_that_moves_with_the_output(source, output):
    pointer = None
    for end, token in enumerate(output, 1):                      # as in the paper: move on, or look for the end anew
        if pointer is not None and pointer < len(source) and source[pointer] == token:
            pointer += 1
        else:
            pointer, _ = anchor(source, output[:end])
        assert pointer is None or anchor(source, output[:end])[0] == pointer


@pytest.mark.parametrize("prompt, output, options, draft", [
    ([5, 1, 2, 3, 4], [], {}, []),                               # nothing is written yet
    ([5, 1, 2, 3, 4], [1], {}, [2, 3, 4]),                       # up to the end of the prompt, not into the output
    ([5, 1, 2, 3, 4], [1], dict(draft_length=2), [2, 3]),
    ([5, 1, 2, 3, 4], [1, 9], {}, []),                           # a mismatch
    ([5, 1, 2, 3, 4], [1, 9, 3], {}, [4]),                       # found again, behind the replaced token
    ([5, 1, 2, 3, 4], [1, 9, 3], dict(min_match=2), []),
    ([1, 2, 7, 1, 3], [1], {}, []),                              # two places
    ([1, 2, 7, 1, 3], [7, 1], {}, [3]),                          # a longer end tells them apart
    ([5, 1, 2], [8, 6, 8], {}, []),                              # only in the output
])
def test_drafts_of_short_texts(prompt, output, options, draft):
    counts = np.ones((len(output) + 1, 1), int)
    *_, moment = feed(InputGuided(**options), [prompt + output], [len(prompt)], counts, vocabulary=10, capacity=WIDTH)
    assert moment.row(0) == draft


@pytest.mark.parametrize("name", ["draft_length", "min_match"])
def test_options_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        InputGuided(**{name: 0})
