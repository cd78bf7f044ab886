"""Packing documents into rows, and batches of rows: deterministic, and resumable at any batch.

B rows of a batch, S tokens of a row; D documents of the corpus, P pieces of documents, R rows of all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from parallax.train.corpus import Corpus


class Batch(NamedTuple):
    """Rows of pieces of documents, or one row without the axis B.

    Attributes:
      tokens: zeros where there is no document.
      segments: 1, 2, .. for the pieces of a row, 0 where there is none.
      positions: from 0 in every piece.
      weights: what predicting this token (from the ones before it) counts: 1, but 0 where there is none, for a piece's
        first token and for tokens of a prompt.
    """

    tokens: Int[np.ndarray, "B S"]
    segments: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    weights: Float[np.ndarray, "B S"]


class Plan(NamedTuple):
    """Which pieces of documents are in which row.

    Attributes:
      length: of every row.
      begins: where in the corpus each piece begins.
      sizes: tokens of each piece.
      given: leading tokens of each piece that count nothing as targets: at least the first.
      rows: row r holds the pieces rows[r] to rows[r + 1].
    """

    length: int
    begins: Int[np.ndarray, "P"]
    sizes: Int[np.ndarray, "P"]
    given: Int[np.ndarray, "P"]
    rows: Int[np.ndarray, "R+1"]


def pack(corpus: Corpus, length: int) -> Plan:
    """Cuts documents into pieces of at most `length` tokens and fits these into rows.

    A piece that goes on where another was cut repeats its last token, so that every token but the first of a document
    is predicted once. Pieces without such a token are left out. Each piece, in the order of the corpus, goes to the
    row with the least room that suffices.

    Raises:
      ValueError: a row is too short to predict anything.
    """
    if length < 2:
        raise ValueError(f"a row needs at least 2 tokens, one to predict another from: got length {length}")
    lengths, step = np.diff(corpus.starts), length - 1
    counts = np.maximum(-(-(lengths - 1) // step), 0)
    document = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    sizes = np.minimum(lengths[document] - offsets, length)
    given = np.maximum(corpus.prompts[document] - offsets, 1)
    kept = given < sizes
    begins, sizes, given = (array[kept] for array in (corpus.starts[document] + offsets, sizes, given))
    row = _fit(sizes.tolist(), length)
    order = np.argsort(row, kind="stable")
    return Plan(length, begins[order], sizes[order], given[order],
                np.concatenate([[0], np.cumsum(np.bincount(row), dtype=np.int64)]))


def _fit(sizes: Sequence[int], length: int) -> Int[np.ndarray, "P"]:
    """The row of each piece, by best fit.

    Bit n of one integer says whether a row has room for exactly n more, so that the least sufficient room is the lowest
    bit of a shifted integer, however many rows are open.
    """
    result, rows = np.zeros(len(sizes), np.int64), 0
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0
    for i, size in enumerate(sizes):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row, rows = length, rows, rows + 1
        left = room - size
        if left > 1:                    # the shortest piece has two tokens
            open_rows[left].append(row)
            rooms |= 1 << left
        result[i] = row
    return result


@dataclasses.dataclass(frozen=True)
class Rows:
    """Random access to packed rows, for grain."""

    corpus: Corpus
    plan: Plan

    def __len__(self) -> int:
        return len(self.plan.rows) - 1

    def __getitem__(self, i: int) -> Batch:
        pieces = slice(*self.plan.rows[i:i + 2])
        sizes = self.plan.sizes[pieces]
        segments = np.repeat(np.arange(len(sizes)), sizes)
        positions = np.arange(len(segments)) - (np.cumsum(sizes) - sizes)[segments]
        tokens = self.corpus.tokens[self.plan.begins[pieces][segments] + positions]
        weights = positions >= self.plan.given[pieces][segments]

        def padded(array: np.ndarray, dtype: type) -> np.ndarray:
            result = np.zeros(self.plan.length, dtype)
            result[:len(array)] = array
            return result

        return Batch(padded(tokens, np.int32), padded(segments + 1, np.int32), padded(positions, np.int32),
                     padded(weights, np.float32))


def batches(corpus: Corpus, *, length: int, batch_size: int, seed: int, repeat: bool = True) -> grain.DatasetIterator:
    """Batches of shuffled rows; with `repeat` without end, every epoch in another order.

    The state of the iterator (`get_state`, `set_state`, or as an item of an orbax checkpoint) is a number, so going on
    gives the very batches that would have come. Without `repeat`, the last batch is filled up with rows of zeros.

    Raises:
      ValueError: there is nothing to predict, or a number is out of range.
    """
    if batch_size < 1 or seed < 0:
        raise ValueError(f"expected batch_size >= 1 and seed >= 0, got {batch_size} and {seed}")
    rows = Rows(corpus, pack(corpus, length))
    if not len(rows):
        raise ValueError(f"there is nothing to predict in {len(corpus.prompts)} documents of {len(corpus.tokens)} "
                         "tokens: every one has a token to learn only behind its first and its prompt; give more text")
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle()
    if repeat:
        dataset = dataset.repeat()
    dataset = dataset.batch(batch_size, drop_remainder=repeat, batch_fn=functools.partial(_stack, batch_size))
    # One thread prepares the next batches while the device computes; more would only compete for the interpreter.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def _stack(batch_size: int, rows: Sequence[Batch]) -> Batch:
    result = Batch(*(np.zeros((batch_size, len(array)), array.dtype) for array in rows[0]))
    for i, row in enumerate(rows):
        for into, array in zip(result, row):
            into[i] = array
    return result


def held_out_batches(corpus: Corpus, *, length: int, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """All rows once, or the first `limit` batches of them, in a fixed random order; nothing of an empty corpus."""
    if not len(corpus.prompts):
        return iter(())
    return itertools.islice(batches(corpus, length=length, batch_size=batch_size, seed=0, repeat=False), limit)


def prompts(corpus: Corpus, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts cut from documents in turn, in a random order: fewer prompts are the first of more.

    Each is `length` tokens from a random place, and never a document's last token, which is its end. A document that
    has a prompt gives that, or its last `length` tokens.

    Raises:
      ValueError: no document is long enough.
    """
    begins, own = corpus.starts[:-1], corpus.prompts
    room = np.where(own > 0, 1, np.diff(corpus.starts) - length)        # places to cut at
    usable = np.flatnonzero(room > 0)
    if not len(usable) or length < 1:
        raise ValueError(f"no prompt of {length} tokens can be cut from {len(room)} documents, the longest of "
                         f"{np.diff(corpus.starts).max(initial=0)} tokens: ask for shorter ones, or give more text")
    random = np.random.default_rng(seed)
    chosen = random.permutation(usable)[np.arange(count) % len(usable)]
    begins = begins[chosen] + np.where(own[chosen] > 0, np.maximum(own[chosen] - length, 0),
                                       (random.random(count) * room[chosen]).astype(np.int64))
    sizes = np.where(own[chosen] > 0, np.minimum(own[chosen], length), length)
    return [corpus.tokens[begin:begin + size].tolist() for begin, size in zip(begins, sizes)]


def summary(corpus: Corpus, plan: Plan) -> dict[str, int | float | str]:
    """What a training run says of its data. `fill` is the fraction of the rows' tokens that is text."""
    rows = len(plan.rows) - 1
    return {"documents": len(corpus.prompts), "tokens": len(corpus.tokens), "rows": rows,
            "targets": int((plan.sizes - plan.given).sum()),
            "fill": float(plan.sizes.sum() / max(rows * plan.length, 1)), "digest": corpus.digest}


def visible(segments: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """What each token attends to: its own piece up to itself. Where there is none, itself, so that softmax is defined.
    """
    size = segments.shape[-1]
    causal, itself = jnp.tril(jnp.ones((size, size), bool)), jnp.eye(size, dtype=bool)
    same = segments[:, :, None] == segments[:, None, :]
    return same & causal & (segments > 0)[:, :, None] | itself
