"""The n-gram pool against dicts of lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import NgramPool, pool
from parallax.testing.feed import feed

WIDTH, VOCABULARY = 20, 8


def oracle(text, ngram=4, branches=2, buckets=4096):
    """The branches behind the last token, the latest first: every n-gram of the text entered in its order."""
    kept = {}                                                        # bucket -> (key, its n-grams, the oldest first)
    for start in range(len(text) - ngram + 1):
        key, gram = text[start], tuple(text[start + 1:start + ngram])
        owner, grams = kept.get(key % buckets, (key, []))
        grams = [other for other in grams if other != gram] if owner == key else []
        kept[key % buckets] = key, [*grams, gram][-branches:]
    owner, grams = kept.get(text[-1] % buckets, (None, []))
    return grams[::-1] if owner == text[-1] else []


def branches(moment, b, depth):
    """The valid branches of a row's draft."""
    tokens, valid = (np.asarray(x)[b, 1:].reshape(-1, depth) for x in (moment.draft.tokens, moment.draft.valid))
    assert (valid.all(1) == valid.any(1)).all()
    return [tuple(row.tolist()) for row, there in zip(tokens, valid) if there[0]]


@pytest.mark.parametrize("options", [dict(), dict(ngram=2, branches=3), dict(ngram=3, branches=1, buckets=2)])
@settings(deadline=None, max_examples=15)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
       seed=st.integers(0, 99))
def test_drafts_the_latest_ngrams_of_the_text(options, texts, seed):
    drafter, random = NgramPool(**options), np.random.default_rng(seed)
    prompts = [int(random.integers(1, len(text) + 1)) for text in texts]
    for moment in feed(drafter, texts, prompts, random.integers(1, 5, (8, 3)), vocabulary=VOCABULARY, capacity=WIDTH):
        for b, end in enumerate(np.asarray(moment.ctx.length)):
            assert branches(moment, b, drafter.depth) == oracle(texts[b][:end], **options)


def test_the_tree_has_one_branch_per_ngram():
    drafter, texts = NgramPool(ngram=3, branches=2), [[1, 2, 3, 1, 4, 5, 1]]
    moment = next(feed(drafter, texts, [7], np.ones((1, 1), int), vocabulary=VOCABULARY, capacity=WIDTH))
    assert (moment.draft.parents, moment.draft.depth, drafter.depth) == ((0, 0, 1, 0, 3), 2, 2)
    assert moment.draft.tokens.tolist() == [[1, 4, 5, 2, 3]]


@pytest.fixture(scope="module")
def insert():
    return jax.jit(lambda p, key, gram, there: pool.insert(p, *(jnp.asarray(x) for x in (key, gram, there))))


def test_an_ngram_that_comes_again_outlives_an_older_one(insert):
    ours = pool.new(1, 4, 2, 1)
    for token in (5, 6, 5, 7):
        ours = insert(ours, [1], [[token]], [True])
    grams, there = pool.lookup(ours, jnp.asarray([1]))
    assert grams[0, :, 0].tolist() == [7, 5] and there.all()


def test_a_key_takes_over_the_bucket_of_another_one(insert):
    ours = insert(pool.new(1, 4, 2, 1), [1], [[3]], [True])
    ours = insert(ours, [5], [[2]], [True])
    assert not pool.lookup(ours, jnp.asarray([1]))[1].any()
    grams, there = pool.lookup(ours, jnp.asarray([5]))
    assert (grams[0, :, 0].tolist(), there[0].tolist()) == ([2, 0], [True, False])


def test_sequences_have_pools_of_their_own(insert):
    ours = insert(pool.new(2, 4, 2, 1), [1, 1], [[3], [4]], [True, False])
    assert pool.lookup(ours, jnp.asarray([1, 1]))[1].sum(1).tolist() == [1, 0]


@pytest.mark.parametrize("options, message", [
    (dict(ngram=1), "ngram must be at least 2, got 1"), (dict(branches=0), "branches must be at least 1, got 0"),
    (dict(buckets=0), "buckets must be at least 1, got 0"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NgramPool(**options)
