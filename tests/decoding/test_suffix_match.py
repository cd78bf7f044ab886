"""Suffix matching against a search that looks everywhere, and a suffix automaton."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import SuffixMatch, loop, make_decoder
from parallax.decoding.corpus import SEPARATOR, load_corpus
from parallax.models import Model
from parallax.testing import CHECKS, Case, tiny_config
from parallax.testing.feed import feed, rewound
from parallax.tokenizer import ByteTokenizer

WIDTH, VOCABULARY = 20, 4
CORPUS = [0, 1, 2, 0, 0, 1, SEPARATOR, 2, 2, 1, 0, SEPARATOR, 1, 1]
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3)


def common(a, b):
    """How many last tokens two texts have in common."""
    size = 0
    while size < min(len(a), len(b)) and a[-1 - size] == b[-1 - size] >= 0:
        size += 1
    return size


def longest(text, source, stop):
    """(length of the longest match of the text's end in source[:stop], the first place where it ends)."""
    match = [common(text, source[:end + 1]) for end in range(stop)]
    return (max(match), match.index(max(match))) if match else (0, 0)


def oracle(text, draft_length=7, min_match=2, growth=4.0, corpus=None, static_bias=5):
    """(draft, match) by looking everywhere."""
    (match, end), source = longest(text, text, len(text) - 1), text
    if corpus is not None:
        known, place = longest(text, corpus, len(corpus))
        if known >= min_match and match <= known + static_bias:
            match, end, source = known, place, corpus
    if match < min_match:
        return [], 0
    draft = source[end + 1:end + 1 + min(draft_length, int(growth * match))]
    draft = draft[:draft.index(SEPARATOR)] if SEPARATOR in draft else draft
    return draft, match if draft else 0


def along(drafter, texts, random, prompts=None):
    """The moments of a random decoding of `texts`."""
    prompts = prompts or [int(random.integers(1, len(text) + 1)) for text in texts]
    return feed(drafter, texts, prompts, random.integers(1, 5, (8, len(texts))), vocabulary=VOCABULARY, capacity=WIDTH)


@pytest.mark.parametrize("options", [dict(min_match=1), dict(draft_length=3), dict(min_match=1, growth=1.5),
                                     dict(corpus=CORPUS, min_match=1, static_bias=0), dict(corpus=CORPUS)])
@settings(deadline=None, max_examples=15)
@given(texts=TEXTS, seed=st.integers(0, 99))
def test_drafts_what_a_plain_search_finds(options, texts, seed):
    drafter = SuffixMatch(**options)
    if "corpus" in options:
        drafter = dataclasses.replace(drafter, corpus=jnp.asarray(CORPUS))
    moments = list(along(drafter, texts, np.random.default_rng(seed)))
    for moment in moments:
        for b, end in enumerate(np.asarray(moment.ctx.length)):
            draft, match = oracle(texts[b][:end], **options)
            assert (moment.row(b), int(moment.draft.match[b])) == (draft, match)
    first, last = moments[0], moments[-1]                       # back to where it was, with what it knows by the end
    again = rewound(drafter, last, first)
    for b in range(len(texts)):
        assert (again.row(b), again.draft.match[b]) == (first.row(b), first.draft.match[b])


def automaton(text):
    """(length of the longest match, end of its first place) by a suffix automaton that is built token by token."""
    states = [dict(next={}, link=-1, length=0, end=0)]
    last, state, match = 0, 0, 0
    for place, token in enumerate(text):
        while state and token not in states[state]["next"]:
            state = states[state]["link"]
            match = states[state]["length"]
        state, match = (states[state]["next"][token], match + 1) if token in states[state]["next"] else (0, 0)
        states.append(dict(next={}, link=0, length=place + 1, end=place))
        new, at = len(states) - 1, last
        while at >= 0 and token not in states[at]["next"]:
            states[at]["next"][token] = new
            at = states[at]["link"]
        if at >= 0:
            old = states[at]["next"][token]
            if states[old]["length"] != states[at]["length"] + 1:
                states.append({**states[old], "next": dict(states[old]["next"]), "length": states[at]["length"] + 1})
                clone = len(states) - 1
                while at >= 0 and states[at]["next"].get(token) == old:
                    states[at]["next"][token] = clone
                    at = states[at]["link"]
                if state == old and match <= states[clone]["length"]:
                    state = clone
                states[old]["link"] = old = clone
            states[new]["link"] = old
        last = new
    return match, states[state]["end"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH))
def test_the_search_finds_what_a_suffix_automaton_finds(text):
    match, end = automaton(text)
    assert (match, end if match else 0) == longest(text, text, len(text) - 1)


@pytest.mark.parametrize("text, options, draft", [
    ([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], {}, [9, 1, 2, 3, 8, 1, 2]),     # of two equally long matches the first
    ([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], dict(min_match=4), []),
    ([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], dict(draft_length=2), [9, 1]),
    ([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], dict(growth=1), [9, 1, 2]),
    ([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], dict(corpus=[2, 3, 5, 6]), [5, 6]),             # the corpus goes first
    ([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], dict(corpus=[2, 3, 5, 6], static_bias=0, draft_length=2), [9, 1]),
    ([2, 3, 5], dict(corpus=[2, 3, 5, SEPARATOR, 5, 7]), []),              # never into the next document
])
def test_drafts_of_short_texts(text, options, draft):
    options = {k: jnp.asarray(v) if k == "corpus" else v for k, v in options.items()}
    moment = next(feed(SuffixMatch(**options), [text], [len(text)], np.ones((1, 1), int), vocabulary=10, capacity=16))
    assert moment.row(0) == draft
    assert (moment.draft.kind, moment.draft.depth) == ("deterministic", options.get("draft_length", 7))


def test_with_a_corpus_the_tokens_stay_those_of_plain_decoding_and_come_in_few_steps():
    case = Case.tiny()
    texts = case.reference(make_decoder("autoregressive", case.model).verifier.sampler)
    corpus = np.asarray([token for text in texts for token in (*text, SEPARATOR)], np.int32)
    decoder = make_decoder("suffix_match", case.model, corpus=corpus)
    CHECKS["equals_plain_decoding"](decoder, case)
    info = loop.run(case.inputs(decoder), case.capacity).info
    assert (np.asarray(info.accepted) >= 18).all() and (np.asarray(info.target_forwards) <= 6).all()
    other = make_decoder("suffix_match", case.model, corpus=np.roll(corpus, 5))
    compiled = loop.run._cache_size()
    loop.run(case.inputs(other), case.capacity)
    assert loop.run._cache_size() == compiled


def test_a_corpus_file_becomes_token_ids_with_documents_apart(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"text": "ab"}\n{"prompt": "c"}\n')
    (tmp_path / "book.txt").write_text("ab\nc")
    assert load_corpus(str(tmp_path / "docs.jsonl"), ByteTokenizer()).tolist() == [97, 98, SEPARATOR, 99]
    assert load_corpus(str(tmp_path / "book.txt"), ByteTokenizer()).tolist() == [97, 98, 10, 99]
    with pytest.raises(ValueError, match="needs the model.s tokenizer and this checkpoint has none"):
        load_corpus(str(tmp_path / "book.txt"), None)
    with pytest.raises(ValueError, match="there is no prompt file"):
        load_corpus(str(tmp_path / "none.txt"), ByteTokenizer())


@pytest.mark.parametrize("options, message", [
    (dict(draft_length=0), "draft_length must be at least 1, got 0"),
    (dict(min_match=0), "min_match must be at least 1, got 0"),
    (dict(growth=-1.0), "growth must be at least 0, got -1.0"),
    (dict(static_bias=-1), "static_bias must be at least 0, got -1"),
    (dict(corpus="/no/such/file.txt"), "there is no corpus file '/no/such/file.txt'"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SuffixMatch(**options)


@pytest.mark.parametrize("corpus, message", [
    (__file__, "corpus must be token ids here, got the path"),
    ([1, 9], "corpus holds token 9, the model's vocabulary is 0 to 3"),
    ([], r"corpus must be a list of token ids, got float64 \[0\]"),
    ([[1]], r"corpus must be a list of token ids, got int64 \[1, 1\]"),
])
def test_a_corpus_that_is_no_tokens_of_the_model_is_refused(corpus, message):
    with pytest.raises(ValueError, match=message):
        SuffixMatch(corpus=corpus).check(Model(tiny_config(vocab_size=VOCABULARY)))
