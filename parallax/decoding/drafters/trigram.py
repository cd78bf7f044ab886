"""Tri-grams: what followed the last two tokens, how often, and the likeliest tree of continuations.

B sequences, H buckets, R ranks, T tree nodes, K committed tokens. Source: ADED (arXiv:2407.12021), whose tree search
is replaced by best-first growth.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding import matching
from parallax.decoding.base import Draft, Drafter, policy, static
from parallax.decoding.growth.base import small_enough

NOTHING = -1            # in front of the last token: the context is that token alone


class Table(NamedTuple):
    """Contexts, and the tokens that followed them with their counts; count 0 where there is none yet."""

    contexts: Int[Array, "*B H 2"]
    tokens: Int[Array, "*B H R"]
    counts: Int[Array, "*B H R"]


@policy
class Trigram(Drafter):
    """Counts the successors of every pair of tokens in prompt and output, and drafts the likeliest tree of them.

    A context is the last two tokens, or, where these were never seen together, the last one. The tree grows node by
    node: always the continuation with the largest product of relative frequencies, of equal ones that of the earlier
    node. The table is hashed and each sequence has its own, of 8 * buckets * (1 + ranks) bytes. A context whose bucket
    belongs to another one takes it over; a new successor of a context with `ranks` of them replaces the rarest, of
    equally rare ones the first.

    Attributes:
      nodes: draft tokens per step.
      max_depth: longest branch.
      ranks: successors kept per context.
      buckets: contexts kept, at most; about two per different pair of neighbours in the text are wanted.
    """

    nodes: int = static(default=7)
    max_depth: int = static(default=7)
    ranks: int = static(default=4)
    buckets: int = static(default=8192)

    def __post_init__(self):
        for name in ("nodes", "max_depth", "ranks", "buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        small_enough(self.nodes, "the tree")

    @property
    def depth(self) -> int:
        return min(self.nodes, self.max_depth)

    def init(self, params, ctx, prompt, prompt_length):
        shape = (prompt.shape[0], self.buckets)
        return Table(jnp.full((*shape, 2), NOTHING, jnp.int32), jnp.zeros((*shape, self.ranks), jnp.int32),
                     jnp.zeros((*shape, self.ranks), jnp.int32))

    def propose(self, params, own, ctx):
        last = matching.pending(ctx)[:, 0]
        before = jnp.take_along_axis(ctx.tokens, jnp.maximum(ctx.length[:, None] - 2, 0), 1)[:, 0]
        before = jnp.where(ctx.length > 1, before, NOTHING)
        tokens, parents, valid = jax.vmap(self._tree)(own, before, last)
        return Draft(tokens, parents, valid, depth=self.depth), own

    def observe(self, params, own, advance, step, ctx):
        size = advance.tokens.shape[1]
        place = advance.start[:, None] + jnp.arange(size)                            # of the token in front of each
        last, before = (jnp.take_along_axis(ctx.tokens, jnp.clip(place - back, 0, ctx.tokens.shape[1] - 1), 1)
                        for back in (0, 1))
        before = jnp.where(place > 0, before, NOTHING)

        def body(i, table):
            return jax.vmap(learn)(table, before[:, i], last[:, i], advance.tokens[:, i], i < advance.count)

        return lax.fori_loop(0, advance.count.max(), body, own)

    def _tree(self, table: Table, before, last) -> tuple[Int[Array, "T"], Int[Array, "T"], Bool[Array, "T"]]:
        """Best-first growth for one sequence."""
        size = self.nodes + 1

        def offers(node, score, before, last, level, waiting):
            tokens, shares = successors(table, before, last)
            shares = jnp.where(level < self.max_depth, score * shares, 0)
            return waiting[0].at[node].set(tokens), waiting[1].at[node].set(shares)

        def grow(node, carry):
            tokens, parents, valid, level, waiting = carry
            best = jnp.argmax(waiting[1])                                            # of equal ones the first
            parent, rank = best // self.ranks, best % self.ranks
            token, score = waiting[0][parent, rank], waiting[1][parent, rank]
            there = score > 0
            parent = jnp.where(there, parent, 0)
            deeper = level[parent] + 1
            waiting = waiting[0], waiting[1].at[parent, rank].set(0)
            return (tokens.at[node].set(jnp.where(there, token, 0)), parents.at[node].set(parent),
                    valid.at[node].set(there), level.at[node].set(deeper),
                    offers(node, score, tokens[parent], token, deeper, waiting))

        flat = jnp.zeros(size, jnp.int32)
        waiting = jnp.zeros((size, self.ranks), jnp.int32), jnp.zeros((size, self.ranks), jnp.float32)
        waiting = offers(0, jnp.float32(1), before, last, jnp.int32(0), waiting)
        carry = flat.at[0].set(last), flat, jnp.zeros(size, bool).at[0].set(True), flat, waiting
        return lax.fori_loop(1, size, grow, carry)[:3]


def learn(table: Table, before, last, token, written) -> Table:
    """The table of one sequence after `token` followed `last`, and the pair of `before` and `last`, if `written`."""
    table = _count(table, before, last, token, written & (before != NOTHING))
    return _count(table, NOTHING, last, token, written)


def successors(table: Table, before, last) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """(tokens, relative frequencies) behind the pair, or, if that is unknown, behind `last`; 0 where there is none."""
    (known, tokens, counts), single = (_read(table, first, last) for first in (before, NOTHING))
    tokens, counts = (jnp.where(known, *pair) for pair in ((tokens, single[1]), (counts, single[2])))
    return tokens, counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)


def _read(table: Table, before, last):
    """(whether the context is there, its tokens, their counts), counts 0 if it is not."""
    bucket = _bucket(before, last, table.counts.shape[0])
    owner = table.contexts[bucket]
    known = (owner[0] == before) & (owner[1] == last)
    return known, table.tokens[bucket], jnp.where(known, table.counts[bucket], 0)


def _count(table: Table, before, last, token, written) -> Table:
    _, tokens, counts = _read(table, before, last)
    same = (tokens == token) & (counts > 0)
    seen = same.any()
    rank = jnp.where(seen, jnp.argmax(same), jnp.argmin(counts))
    bucket = jnp.where(written, _bucket(before, last, table.counts.shape[0]), table.counts.shape[0])
    return Table(table.contexts.at[bucket].set(jnp.stack([jnp.asarray(before, jnp.int32), last]), mode="drop"),
                 table.tokens.at[bucket].set(tokens.at[rank].set(token), mode="drop"),
                 table.counts.at[bucket].set(counts.at[rank].set(jnp.where(seen, counts[rank] + 1, 1)), mode="drop"))


def _bucket(before, last, buckets: int):
    """The two factors are odd and their bits irregular, so that neighbours spread (Knuth's multiplicative hashing)."""
    before, last = (jnp.asarray(x).astype(jnp.uint32) for x in (before, last))
    mixed = (before * jnp.uint32(0x9E3779B1)) ^ (last * jnp.uint32(0x85EBCA77))
    mixed = mixed ^ (mixed >> 15)
    return (mixed % jnp.uint32(buckets)).astype(jnp.int32)
