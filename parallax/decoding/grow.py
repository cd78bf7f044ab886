"""Grows a draft with a model, level by level. The one loop behind every drafter that is a language model.

B sequences, A root rows, D depth, W rows of a level, R children of a row, R0 of the root, M candidates of a level,
N candidates of all levels, C = A + (D - 1) * W context columns, V vocabulary. `growth.base` explains rows, candidates
and how a tree policy tells them apart.

Nothing is committed while a draft grows: the keys and values of its rows are handed on as `context`, where every row
sees the root rows and its own ancestors. They are returned, so that a drafter with a cache of its own need not compute
those of the accepted path again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding import tree as trees
from parallax.decoding.base import Context, Draft, Kind
from parallax.decoding.control import Controller, Level
from parallax.decoding.growth import Drawn, Rows, TreePolicy
from parallax.decoding.sampling import DRAFT, Greedy, Sampler, Seen, argmax, noise_private, noise_target
from parallax.models.cache import KV, Block, Output


class Source(NamedTuple):
    """The model that writes, and what it must read first.

    forward(block, context, level) and unembed(hidden) as of `Model`; tokens [B, A], positions [B, A] and count [B]:
    the decided tokens that its cache lacks, the last of which is the pending one; end: how many positions it knows.
    unrolled: every level is compiled on its own, with `level` a Python int, and may run fewer layers than the one
    before.
    """

    forward: Callable[[Block, KV | None, Any], Output]
    unembed: Callable[[Array], Array]
    tokens: Int[Array, "B A"]
    positions: Int[Array, "B A"]
    count: Int[Array, "B"]
    end: int | None = None
    unrolled: bool = False


class Grown(NamedTuple):
    """A draft and how it came about: levels [B] that were grown; kv of the C context columns, the first `count` [B] of
    the root's and one for every row; rows [B, R'] the candidate that each row is; tokens and valid [B, N + 1] of the
    candidates, the last of which is none."""

    draft: Draft
    levels: Int[Array, "B"]
    kv: KV
    count: Int[Array, "B"]
    rows: Int[Array, "B R"]
    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]


class _Front(NamedTuple):
    """Rows of one level: token, whether there is one, the columns [B, W, C] that it sees, the drafted tokens [B, W, D]
    down to it, and its path's log-probability and score."""

    tokens: Int[Array, "B W"]
    there: Bool[Array, "B W"]
    seen: Bool[Array, "B W C"]
    path: Int[Array, "B W D"]
    total: Float[Array, "B W"]
    score: Float[Array, "B W"]


class _Store(NamedTuple):
    """What is kept of all levels: see `Grown`, `TreePolicy.assemble` and `Draft`."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    score: Float[Array, "B N"]
    rows: Int[Array, "B DW"]
    logq: Float[Array, "B I V"] | None
    kv: KV
    levels: Int[Array, "B"]


def grow(source: Source, policy: TreePolicy, controller: Controller, control: Any, ctx: Context, *, sampler: Sampler,
         kind: Kind) -> Grown:
    """A draft behind the pending token.

    Args:
      source: the model.
      policy, controller: the tree, and how deep it goes; control: the controller's state.
      ctx: of `propose`.
      sampler, kind: how tokens are drawn, see `Draft`.
    """
    batch, roots = source.tokens.shape
    depth, width, first, rest = policy.depth, policy.width, policy.first, policy.rest
    columns, size = roots + (depth - 1) * width, first + (depth - 1) * width * rest
    longest = controller.longest(control, batch, depth)
    pending = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)

    def level_of(level, front: _Front, hidden, store: _Store, children: int, place):
        """Draws behind the rows of `front` and stores that at `place`, (of candidates, of rows, of their children's
        rows): (the rows of the next level, the store)."""
        seen = Seen(ctx.tokens, ctx.length, front.path, jnp.broadcast_to(jnp.arange(depth) < level, front.path.shape))
        drawn, logq = _draw(source.unembed(hidden), seen, ctx, level, place[0], children, sampler=sampler, kind=kind,
                            scored=policy.scored or controller.scored, replacement=policy.replacement)
        valid = front.there[..., None] & (drawn.logp > -jnp.inf)
        kept = policy.keep(drawn)
        valid = valid if kept is None else valid & kept
        total = front.total[..., None] + drawn.logp
        score = policy.score(Rows(front.total, front.score), drawn) if policy.scored else total
        tokens, valid, logp, total, score = (x.reshape(batch, -1) for x in (
            drawn.tokens, valid, drawn.logp, total, jnp.where(valid, score, -jnp.inf)))
        index, there = policy.select(level, score)
        there = there & jnp.take_along_axis(valid, index, 1)
        store = store._replace(
            tokens=lax.dynamic_update_slice(store.tokens, tokens, (0, place[0])),
            valid=lax.dynamic_update_slice(store.valid, valid, (0, place[0])),
            score=lax.dynamic_update_slice(store.score, score, (0, place[0])),
            rows=lax.dynamic_update_slice(store.rows, jnp.where(there, place[0] + index, size), (0, place[2])),
            logq=None if logq is None else lax.dynamic_update_slice(store.logq, logq, (0, place[1], 0)))

        def chosen(values):
            return jnp.where(there, jnp.take_along_axis(values, index, 1), -jnp.inf)

        goes_on = controller.goes_on(Level(chosen(logp), chosen(total)))
        go = (level + 1 < longest)[:, None]
        go = go if goes_on is None else goes_on & go
        if source.end is not None:
            go = go & (ctx.length + level < source.end)[:, None]
        row = (index // children)[..., None]
        tokens = jnp.take_along_axis(tokens, index, 1)
        path = jnp.where(jnp.arange(depth) == level, tokens[..., None], jnp.take_along_axis(front.path, row, 1))
        return _Front(tokens, there & go, jnp.take_along_axis(front.seen, row, 1), path, chosen(total),
                      chosen(score)), store

    out = source.forward(Block(source.tokens, source.positions, jnp.tril(jnp.ones((roots, roots), bool))), None, 0)
    hidden = jnp.take_along_axis(out.hidden, (source.count - 1)[:, None, None], 1)
    known = jnp.ones((batch, 1), bool) if source.end is None else ctx.length[:, None] - 1 < source.end
    dtype = jax.eval_shape(source.unembed, hidden).dtype
    zero = jnp.zeros((batch, 1), dtype)
    front = _Front(pending, known, jnp.arange(columns) < source.count[:, None, None],
                   jnp.zeros((batch, 1, depth), jnp.int32), zero, zero)
    vocabulary = ctx.model.config.vocab_size
    logq = jnp.zeros((batch, 1 + (depth - 1) * width, vocabulary), dtype) if kind == "sampled" else None
    store = _Store(jnp.zeros((batch, size + 1), jnp.int32), jnp.zeros((batch, size + 1), bool),
                   jnp.full((batch, size + 1), -jnp.inf, dtype), jnp.full((batch, depth * width), size, jnp.int32),
                   logq, _room(out.kv, columns), jnp.ones((batch,), jnp.int32))
    front, store = level_of(0, front, hidden, store, first, (0, 0, 0))

    def deeper(level, carry):
        front, store = carry
        itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
        positions = jnp.broadcast_to(ctx.length[:, None] - 1 + level, front.tokens.shape)
        out = source.forward(Block(front.tokens, positions, jnp.concatenate([front.seen, itself], 2)), store.kv, level)
        row = (level - 1) * width
        store = store._replace(kv=_write(store.kv, out.kv, roots + row),
                               levels=store.levels + front.there.any(1).astype(jnp.int32))
        itself = jnp.arange(columns) == (roots + row + jnp.arange(width))[:, None]
        return level_of(level, front._replace(seen=front.seen | itself), out.hidden, store, rest,
                        (first + row * rest, 1 + row, row + width))

    if source.unrolled:
        for level in range(1, depth):
            front, store = lax.cond(front.there.any(), lambda carry: deeper(level, carry), lambda carry: carry,
                                    (front, store))
    elif depth > 1:
        _, (front, store) = lax.while_loop(
            lambda carry: (carry[0] < depth) & carry[1][0].there.any(),
            lambda carry: (carry[0] + 1, deeper(*carry)), (jnp.int32(1), (front, store)))
    return _assemble(source, policy, controller, store, pending, sampler=sampler, kind=kind)


def _assemble(source, policy, controller, store: _Store, pending, *, sampler, kind) -> Grown:
    """The draft: the candidates that the policy keeps."""
    batch, roots = source.tokens.shape
    nodes, parents, drawn = policy.assemble(store.rows, store.score[:, :-1])
    if isinstance(nodes, tuple):
        tokens, valid = (x[:, jnp.asarray(nodes)] for x in (store.tokens, store.valid))
    else:
        tokens, valid = (jnp.take_along_axis(x, nodes, 1) for x in (store.tokens, store.valid))
    valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    if not isinstance(parents, tuple):
        parents = jnp.where(valid, parents, 0)
    logq = store.logq
    if logq is not None:
        logq = logq[:, :len(drawn)] if drawn == tuple(range(len(drawn))) else logq[:, jnp.asarray(drawn)]
    # Warpers may leave fewer tokens than a row has children.
    certain = (controller.certain and policy.certain and source.end is None
               and (isinstance(sampler, Greedy) or policy.first == policy.rest == 1))
    scores = None
    if policy.scored and kind == "deterministic":
        scores = jnp.take_along_axis(store.score, jnp.broadcast_to(jnp.asarray(nodes), tokens.shape), 1)
        scores = jnp.pad(scores, ((0, 0), (1, 0)))
    draft = Draft(jnp.concatenate([pending, tokens], 1), parents, valid, depth=policy.depth, kind=kind, logq=logq,
                  replacement=policy.replacement and kind == "sampled", certain=certain, scores=scores,
                  forwards=store.levels, rows=roots + policy.width * (store.levels - 1))
    rows = store.rows[:, :(policy.depth - 1) * policy.width]
    return Grown(draft, store.levels, store.kv, source.count, rows, store.tokens, store.valid)


def accepted_columns(grown: Grown, policy: TreePolicy, tokens: Int[Array, "B K"],
                     count: Int[Array, "B"]) -> tuple[Int[Array, "B K"], Int[Array, "B"]]:
    """(columns of `grown.kv`, how many of them): the root rows and those on the path that the text took.

    tokens [B, K], count [B]: the text behind the pending token, the new pending token last. Reads no verdict, so the
    text may as well have been accepted from another draft. Nothing for a sequence with count 0.
    """
    roots = grown.kv.positions.shape[1] - grown.rows.shape[1]
    depth, width = policy.depth, policy.width
    level = 1 + jnp.arange(grown.rows.shape[1]) // width
    mine, there = (jnp.take_along_axis(x, grown.rows, 1) for x in (grown.tokens, grown.valid))
    there = there & (level < grown.levels[:, None])               # a controller may stop in front of a chosen row
    right = there & (mine == tokens[:, level - 1]) & (level < count[:, None])
    index = jnp.arange(roots + depth - 1)
    behind = jnp.clip(index - grown.count[:, None] + 1, 0, depth - 1)
    if width == 1:                                                    # a chain of rows, which needs no search
        deep = jnp.cumprod(right, 1, dtype=jnp.int32).sum(1)
    else:
        parents = jnp.where(there, policy.row_of(grown.rows), 0).astype(jnp.int32)
        mine, parents, there, right = (jnp.pad(x, ((0, 0), (1, 0))) for x in (mine, parents, there, right))
        rows = Draft(mine, parents, there, depth=depth - 1)
        path = trees.verdict(rows, trees.deepest(rows, right), count)
        behind, deep = jnp.take_along_axis(path.path, behind, 1), path.count - 1
    columns = jnp.where(index < grown.count[:, None], index, roots - 1 + behind)
    return columns, jnp.where(count > 0, grown.count + deep, 0)


def _draw(logits: Float[Array, "B W V"], seen: Seen, ctx: Context, level, candidate, children: int, *,
          sampler: Sampler, kind: Kind, scored: bool,
          replacement: bool) -> tuple[Drawn, Float[Array, "B W V"] | None]:
    """(candidates behind each row, best first; their law if they are sampled). `candidate`: the first one's number."""
    width, size = logits.shape[1:]
    # What the greedy warper leaves is one token, and a tree wants the runners-up.
    warped = law = sampler.penalise(logits, seen) if isinstance(sampler, Greedy) else sampler.warp(logits, seen)
    values = warped
    if kind == "sampled":
        law = jax.nn.log_softmax(warped, -1)
        draws = children if replacement else 1
        # Numbers of candidates, as no two levels share any: those of rows times draws would meet in a narrowing tree.
        number = ctx.length + (candidate + jnp.arange(width * draws))[:, None]                            # [W', B]
        noise = jax.vmap(lambda n: noise_private(ctx.key, ctx.length, n, DRAFT, size), out_axes=1)(number)
        values = jnp.repeat(law, draws, 1) + noise
    elif kind == "coupled":
        values = warped + noise_target(ctx.key, ctx.length + level, size)[:, None]
    if children == 1 or values.shape[1] > width:
        tokens = argmax(values)[..., None]
        best = jnp.take_along_axis(values, tokens, 2)
    else:
        best, tokens = lax.top_k(values, children)
    tokens, best = (x.reshape(x.shape[0], width, children) for x in (tokens.astype(jnp.int32), best))
    if scored:
        logp = jnp.take_along_axis(law, tokens, 2)
        if kind != "sampled":
            logp = logp - jax.nn.logsumexp(law, -1, keepdims=True)
        logp = jnp.minimum(logp, 0)                  # rounding must not put a node above the one in front of it
    elif children == 1:
        logp = jnp.zeros_like(best)
    else:
        logp = jnp.where(best == -jnp.inf, best, 0)
    return Drawn(tokens, logp, best), law if kind == "sampled" else None


def _room(kv: KV, columns: int) -> KV:
    """With columns for the rows to come, which nobody sees yet."""
    def widen(x):
        return jnp.pad(x, [(0, 0), (0, columns - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(widen, kv)


def _write(kv: KV, new: KV, column) -> KV:
    """The columns from `column` on, of as many layers as `new` has."""
    def write(old, rows):
        return lax.dynamic_update_slice_in_dim(old, rows.astype(old.dtype), column, 1)

    def layers(old, rows):
        return tuple(map(write, old, rows)) + old[len(rows):]

    return KV(layers(kv.k, new.k), layers(kv.v, new.v), write(kv.positions, new.positions))
