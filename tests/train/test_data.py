"""Packing, and the batches that training sees."""

import itertools
import json
import pickle

import grain.checkpoint
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.train import corpus, data
from parallax.train.data import Batch, Rows, pack

DOCUMENTS = st.lists(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1,
                     max_size=25)


def numbered(sizes) -> corpus.Corpus:
    """Documents of (size, prompt) whose token ids tell where in the corpus they stand, from 1."""
    ids = itertools.count(1)
    return corpus.from_documents([([next(ids) for _ in range(size)], prompt) for size, prompt in sizes])


SOME = numbered([(30, 0), (3, 0), (9, 4), (2, 1), (17, 0), (5, 5), (1, 0), (12, 0), (8, 0)])


def taken(iterator, count):
    return [next(iterator) for _ in range(count)]


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b),
                                                                           strict=True))


@settings(max_examples=80, deadline=None)
@given(DOCUMENTS, st.integers(2, 16))
def test_every_token_is_a_target_once_except_first_tokens_and_prompts(documents, length):
    c = numbered(documents)
    rows = [Rows(c, pack(c, length))[i] for i in range(len(Rows(c, pack(c, length))))]
    targets = sorted(int(t) for row in rows for t in row.tokens[row.weights > 0])
    wanted = [c.tokens[start + i] for start, (size, prompt) in zip(c.starts, documents)
              for i in range(max(prompt, 1), size)]
    assert targets == wanted


@settings(max_examples=80, deadline=None)
@given(DOCUMENTS, st.integers(2, 16))
def test_a_row_is_pieces_of_documents_one_behind_the_other(documents, length):
    c = numbered(documents)
    plan = pack(c, length)
    document = np.repeat(np.arange(len(documents)), [size for size, _ in documents])
    for i in range(len(Rows(c, plan))):
        row = Rows(c, plan)[i]
        assert [x.shape for x in row] == [(length,)] * 4
        assert [x.dtype for x in row] == [np.int32] * 3 + [np.float32]
        full = int((row.segments > 0).sum())
        assert row.segments[:full].all() and not any(x[full:].any() for x in row)
        assert row.segments[0] == 1 and set(np.diff(row.segments[:full])) <= {0, 1}
        for segment in range(1, row.segments.max() + 1):
            piece = row.segments == segment
            tokens = row.tokens[piece]
            assert row.positions[piece].tolist() == list(range(len(tokens)))
            assert (np.diff(tokens) == 1).all() and len(set(document[tokens - 1])) == 1
            assert row.weights[piece][0] == 0 and row.weights[piece].any()      # no piece is there for nothing


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=60))
def test_no_two_rows_could_have_been_one(sizes):
    rows = np.diff(pack(numbered([(n, 0) for n in sizes]), 16).rows)
    assert len(rows) <= 1.7 * -(-sum(sizes) // 16) + 1          # the bound of best fit


def test_a_piece_goes_to_the_row_with_the_least_room_that_suffices():
    plan = pack(numbered([(4, 0), (8, 0), (6, 0), (2, 0), (4, 0)]), 10)
    pieces = [plan.begins[a:b].tolist() for a, b in zip(plan.rows, plan.rows[1:])]
    assert pieces == [[0, 12], [4, 18], [20]]


def test_a_long_document_loses_no_target_where_it_is_cut():
    c = numbered([(9, 0)])
    rows = Rows(c, pack(c, 4))
    assert [rows[i].tokens.tolist() for i in range(len(rows))] == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 0]]
    assert [rows[i].weights.tolist() for i in range(len(rows))] == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]]


def test_a_prompt_counts_nothing_even_when_it_is_cut():
    c = numbered([(9, 5)])
    rows = Rows(c, pack(c, 4))
    assert [rows[i].tokens.tolist() for i in range(len(rows))] == [[4, 5, 6, 7], [7, 8, 9, 0]]
    assert [rows[i].weights.tolist() for i in range(len(rows))] == [[0, 0, 1, 1], [0, 1, 1, 0]]


def test_rows_travel_to_another_process():
    rows = Rows(SOME, pack(SOME, 8))
    assert all(equal(pickle.loads(pickle.dumps(rows))[i], rows[i]) for i in range(len(rows)))


def all_targets(batches) -> list[int]:
    return sorted(int(t) for batch in batches for t in batch.tokens[batch.weights > 0])


def test_an_epoch_has_every_row_and_the_next_has_them_in_another_order():
    rows = len(Rows(SOME, pack(SOME, 8)))
    iterator = data.batches(SOME, length=8, batch_size=1, seed=3)
    first, second = taken(iterator, rows), taken(iterator, rows)
    assert all_targets(first) == all_targets(second) and not equal(first, second)
    assert len(all_targets(first)) == data.summary(SOME, pack(SOME, 8))["targets"]


def test_the_seed_decides_the_order():
    def some(seed):
        return taken(data.batches(SOME, length=8, batch_size=2, seed=seed), 5)

    assert equal(some(1), some(1)) and not equal(some(1), some(2))


def test_a_batch_may_be_larger_than_the_corpus():
    batch = next(data.batches(SOME, length=8, batch_size=50, seed=0))
    assert isinstance(batch, Batch) and [x.shape for x in batch] == [(50, 8)] * 4
    assert batch.weights.any(axis=1).all()


@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_going_on_gives_the_very_batches_that_would_have_come(consumed):
    iterator = data.batches(SOME, length=8, batch_size=3, seed=5)
    taken(iterator, consumed)
    state = json.dumps(iterator.get_state())
    expected = taken(iterator, 12)
    fresh = data.batches(SOME, length=8, batch_size=3, seed=5)
    fresh.set_state(json.loads(state))
    assert equal(taken(fresh, 12), expected)
    iterator.set_state(json.loads(state))               # also backwards
    assert equal(taken(iterator, 12), expected)


def test_the_iterator_is_an_item_of_an_orbax_checkpoint(tmp_path):
    iterator = data.batches(SOME, length=8, batch_size=3, seed=5)
    taken(iterator, 4)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        fresh = data.batches(SOME, length=8, batch_size=3, seed=5)
        manager.restore(4, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(fresh)))
    assert equal(taken(fresh, 3), taken(iterator, 3))


def test_held_out_rows_come_once_and_the_last_batch_is_filled_with_nothing():
    batches = list(data.held_out_batches(SOME, length=8, batch_size=5))
    rows = data.summary(SOME, pack(SOME, 8))["rows"]
    assert rows % 5 and len(batches) == -(-rows // 5) and all(b.tokens.shape == (5, 8) for b in batches)
    assert len(all_targets(batches)) == data.summary(SOME, pack(SOME, 8))["targets"]
    assert not any(x[rows % 5:].any() for x in batches[-1]) and batches[-1].weights[:rows % 5].any(axis=1).all()
    assert equal(list(data.held_out_batches(SOME, length=8, batch_size=5)), batches)
    assert equal(list(data.held_out_batches(SOME, length=8, batch_size=5, limit=2)), batches[:2])


def test_an_empty_corpus_has_no_held_out_batches():
    assert list(data.held_out_batches(corpus.split(SOME, 0)[1], length=8, batch_size=5)) == []


@pytest.mark.parametrize("options, message", [
    (dict(length=1), "a row needs at least 2 tokens, one to predict another from: got length 1"),
    (dict(batch_size=0), "expected batch_size >= 1 and seed >= 0, got 0 and 0"),
    (dict(seed=-1), "expected batch_size >= 1 and seed >= 0, got 2 and -1"),
    (dict(corpus=numbered([(1, 0), (5, 5)])), "there is nothing to predict in 2 documents of 6 tokens"),
])
def test_impossible_batches_are_refused(options, message):
    options = dict(corpus=SOME, length=8, batch_size=2, seed=0) | options
    with pytest.raises(ValueError, match=message):
        data.batches(options.pop("corpus"), **options)


def test_the_summary_counts():
    c = numbered([(9, 0), (3, 0), (1, 0), (4, 4)])
    assert data.summary(c, pack(c, 4)) == {"documents": 4, "tokens": 17, "rows": 4, "targets": 10, "fill": 14 / 16,
                                           "digest": c.digest}


def test_prompts_are_cut_from_documents_in_turn():
    c = numbered([(30, 0), (3, 0), (40, 0), (25, 0)])
    found = data.prompts(c, 9, 5)
    document = np.repeat(np.arange(4), np.diff(c.starts))
    for ids in found:
        assert len(ids) == 5 and (np.diff(ids) == 1).all() and len(set(document[np.asarray(ids) - 1])) == 1
        assert ids[-1] not in c.starts[1:]              # the end of a document is no prompt's
    order = [document[ids[0] - 1] for ids in found]
    assert sorted(order[:3]) == [0, 2, 3] and order == order[:3] * 3
    assert len({ids[0] for ids in found}) > 5
    assert data.prompts(c, 4, 5) == found[:4] and data.prompts(c, 9, 5, seed=1) != found


def test_a_document_with_a_prompt_gives_that():
    c = numbered([(9, 3), (9, 8)])
    assert sorted(data.prompts(c, 2, 5)) == [[1, 2, 3], [13, 14, 15, 16, 17]]


@pytest.mark.parametrize("documents, length", [([(5, 0)], 5), ([(5, 0)], 0)])
def test_prompts_that_no_document_has_are_refused(documents, length):
    with pytest.raises(ValueError, match=f"no prompt of {length} tokens can be cut from 1 documents, the longest of 5"):
        data.prompts(numbered(documents), 1, length)


def test_a_token_sees_its_own_piece_up_to_itself():
    seen = jax.jit(data.visible)(np.asarray([[1, 1, 2, 2, 0, 0]]))[0].astype(int)
    assert seen.tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0],
                             [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
