"""Tri-gram trees against counts kept in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import Trigram
from parallax.decoding.drafters import trigram
from parallax.testing.feed import feed

WIDTH, VOCABULARY = 20, 8


def table_of(text, ranks, buckets):
    """bucket -> (context, tokens, counts) after the whole text, entered token by token."""
    table = {}

    def count(context, token):
        bucket = _bucket(*context, buckets)
        owner, tokens, counts = table.get(bucket, (None, [], []))
        if owner != context:                                     # a new context takes the bucket over
            tokens, counts = [], []
        if token in tokens:
            counts[tokens.index(token)] += 1
        elif len(tokens) < ranks:
            tokens, counts = [*tokens, token], [*counts, 1]
        else:
            rarest = counts.index(min(counts))
            tokens[rarest], counts[rarest] = token, 1
        table[bucket] = context, tokens, counts

    for place in range(1, len(text)):
        if place > 1:
            count((text[place - 2], text[place - 1]), text[place])
        count((-1, text[place - 1]), text[place])
    return table


def _bucket(before, last, buckets):
    mixed = (before * 0x9E3779B1 ^ last * 0x85EBCA77) % 2**32
    return (mixed ^ mixed >> 15) % buckets


def oracle(text, nodes=7, max_depth=7, ranks=4, buckets=8192):
    """[(token, parent)] of the tree, best first."""
    table = table_of(text, ranks, buckets)

    def offers(before, last):
        for context in ((before, last), (-1, last)):
            owner, tokens, counts = table.get(_bucket(*context, buckets), (None, [], []))
            if owner == context:
                return [(token, np.float32(count) / np.float32(sum(counts))) for token, count in zip(tokens, counts)]
        return []

    before = text[-2] if len(text) > 1 else -1
    grown = [(before, text[-1], 0, 0, np.float32(1))]                       # (before, token, parent, level, score)
    waiting = [(share, 0, token) for token, share in offers(*grown[0][:2])]
    while waiting and len(grown) <= nodes:
        best = max(waiting, key=lambda entry: entry[0])                               # of equal ones the first
        waiting.remove(best)
        score, parent, token = best
        level = grown[parent][3] + 1
        grown.append((grown[parent][1], token, parent, level, score))
        if level < max_depth:
            waiting += [(score * share, len(grown) - 1, t) for t, share in offers(grown[parent][1], token)]
    return [(token, parent) for _, token, parent, _, _ in grown[1:]]


@pytest.mark.parametrize("options", [dict(), dict(nodes=5, max_depth=2, ranks=2),
                                     dict(nodes=9, buckets=3, ranks=1)])
@settings(deadline=None, max_examples=15)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
       seed=st.integers(0, 99))
def test_the_tree_is_that_of_plain_counting(options, texts, seed):
    drafter, random = Trigram(**options), np.random.default_rng(seed)
    prompts = [int(random.integers(1, len(text) + 1)) for text in texts]
    counts = random.integers(1, 5, (8, 3))
    for moment in feed(drafter, texts, prompts, counts, vocabulary=VOCABULARY, capacity=WIDTH):
        tokens, parents, valid = (np.asarray(getattr(moment.draft, name)) for name in ("tokens", "parents", "valid"))
        for b, end in enumerate(np.asarray(moment.ctx.length)):
            wanted = oracle(texts[b][:end], **options)
            assert valid[b].tolist() == [i <= len(wanted) for i in range(drafter.nodes + 1)]
            size = len(wanted) + 1
            assert list(zip(tokens[b, 1:size].tolist(), parents[b, 1:size].tolist())) == wanted
            assert len(set(wanted)) == len(wanted)                                    # no sibling twice


def draft(text, **options):
    moment = next(feed(Trigram(**options), [text], [len(text)], np.ones((1, 1), int), vocabulary=10, capacity=WIDTH))
    valid = np.asarray(moment.draft.valid)[0, 1:]
    return list(zip(np.asarray(moment.draft.tokens)[0, 1:][valid].tolist(),
                    np.asarray(moment.draft.parents)[0, 1:][valid].tolist()))


@pytest.mark.parametrize("text, options, tree", [
    ([7], {}, []),
    ([1, 2, 3, 1, 2], dict(nodes=2), [(3, 0), (1, 1)]),                        # on from what it drafted
    ([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2], dict(nodes=2, max_depth=1), [(3, 0), (4, 0)]),       # the frequent one first
    ([1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 4, 1, 2], dict(nodes=2), [(3, 0), (5, 1)]),  # 3/4 x 3/3 against 1/4
    ([9, 2, 3, 8, 2, 3, 7, 2, 4, 9, 2], dict(nodes=1), [(3, 0)]),              # the pair decides where it is known
    ([9, 2, 3, 8, 2, 3, 7, 2, 4, 5, 2], dict(nodes=2, max_depth=1), [(3, 0), (4, 0)]),       # else the last token
    ([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2], dict(nodes=9, max_depth=1, ranks=2), [(5, 0), (4, 0)]),  # 5 took over from 3
])
def test_trees_of_short_texts(text, options, tree):
    assert draft(text, **options) == tree


@pytest.mark.parametrize("options, depth", [(dict(nodes=3), 3), (dict(max_depth=2), 2)])
def test_the_depth_is_bounded_by_nodes_and_option(options, depth):
    assert Trigram(**options).depth == depth


def test_pairs_are_spread_over_the_buckets():
    pairs = np.stack(np.meshgrid(np.arange(40), np.arange(1000, 1100)), -1).reshape(-1, 2)
    used = np.unique(jax.jit(lambda a, b: trigram._bucket(a, b, 8192))(*jnp.asarray(pairs.T)))
    assert len(used) > 0.9 * 8192 * (1 - np.exp(-len(pairs) / 8192))             # about as many as a random function


@pytest.mark.parametrize("options, message", [
    (dict(nodes=0), "nodes must be at least 1, got 0"), (dict(max_depth=0), "max_depth .* got 0"),
    (dict(ranks=0), "ranks .* got 0"), (dict(buckets=0), "buckets .* got 0"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Trigram(**options)
