"""Trees as data: unite two drafts, hang branches under the nodes of one, keep its best nodes.

B sequences, T tree nodes (row 0 the root), D depth, R branches of G tokens each, V vocabulary.

Each result has a fixed number of nodes, parents of its own for every sequence, and no two valid siblings with the same
token: every path of tokens is there once. What was merged away is invalid. The law that a drawn token came from does
not survive this, so the results are no sampled drafts; they are `coupled` if one of the parts is, else `deterministic`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding.base import Draft, Kind


def merge(a: Draft, b: Draft) -> Draft:
    """The union of two drafts behind the same pending token, T = Ta + Tb - 1 nodes: those of `a` keep their places."""
    size = a.tokens.shape[1]
    ours, theirs = (jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape) for draft in (a, b))
    moved = jnp.where(theirs[:, 1:] == 0, 0, theirs[:, 1:] + size - 1)
    return _unique(a.replace(
        tokens=jnp.concatenate([a.tokens, b.tokens[:, 1:]], 1), parents=jnp.concatenate([ours, moved], 1),
        valid=jnp.concatenate([a.valid, b.valid[:, 1:]], 1), depth=max(a.depth, b.depth), kind=_kind(a, b), logq=None,
        scores=None, certain=False, forwards=a.forwards + b.forwards, rows=a.rows + b.rows))


def graft(base: Draft, onto: Int[Array, "B R"], tokens: Int[Array, "B R G"], valid: Bool[Array, "B R G"]) -> Draft:
    """`base` with a chain of G tokens under each of the nodes `onto`, T = Tb + R G nodes."""
    (batch, size), (_, count, length) = base.tokens.shape, tokens.shape
    index = size + jnp.arange(count * length).reshape(count, length)
    chain = jnp.broadcast_to(index - 1, (batch, count, length)).at[:, :, 0].set(onto)
    parents = jnp.broadcast_to(jnp.asarray(base.parents), base.tokens.shape)
    return _unique(base.replace(
        tokens=jnp.concatenate([base.tokens, tokens.reshape(batch, -1)], 1),
        parents=jnp.concatenate([parents, chain.reshape(batch, -1)], 1),
        valid=jnp.concatenate([base.valid, valid.reshape(batch, -1)], 1), depth=base.depth + length, kind=_kind(base),
        logq=None, scores=None, certain=False))


def prune(draft: Draft, scores: Float[Array, "B T"], nodes: int) -> tuple[Draft, Int[Array, "B T2"]]:
    """(the root and the `nodes` draft tokens of highest score, T2 = nodes + 1; where they stood).

    A node counts for no more than its parent, and of equals the first stays: what is kept hangs together, in order.
    """
    size = draft.tokens.shape[1]
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    scores = jnp.where(draft.valid, scores, -jnp.inf).at[:, 0].set(jnp.inf)
    for _ in range(draft.depth):
        scores = jnp.minimum(scores, jnp.take_along_axis(scores, parents, 1))
    kept = jnp.sort(lax.top_k(scores, min(nodes + 1, size))[1], 1)
    # How many kept nodes stand in front of a kept one is its new place.
    place = jnp.cumsum((jnp.arange(size) == kept[..., None]).any(1), 1, dtype=jnp.int32) - 1
    above = jnp.take_along_axis(parents, kept, 1)
    pruned = draft.replace(
        tokens=jnp.take_along_axis(draft.tokens, kept, 1), parents=jnp.take_along_axis(place, above, 1),
        valid=jnp.take_along_axis(draft.valid, kept, 1), kind=_kind(draft), logq=None,
        scores=None if draft.scores is None else jnp.take_along_axis(draft.scores, kept, 1))
    return pruned, kept


def _kind(*drafts: Draft) -> Kind:
    return "coupled" if any(draft.kind == "coupled" for draft in drafts) else "deterministic"


def _unique(draft: Draft) -> Draft:
    """One node for every path: the first of valid siblings with the same token takes over their children."""
    size = draft.tokens.shape[1]
    alive = draft.valid | (jnp.arange(size) == 0)
    same = draft.tokens[:, :, None] == draft.tokens[:, None, :]
    same &= (jnp.arange(size) > 0) & (jnp.arange(size) > 0)[:, None] | jnp.eye(size, dtype=bool)
    first = jnp.broadcast_to(jnp.arange(size), draft.tokens.shape)
    for _ in range(draft.depth):                    # level by level: siblings are those whose parents became one
        alive &= jnp.take_along_axis(alive, draft.parents, 1)
        above = jnp.take_along_axis(first, draft.parents, 1)
        siblings = same & (above[:, :, None] == above[:, None, :]) & alive[:, None, :]
        first = jnp.where(alive, jnp.argmax(siblings, 2), jnp.arange(size))
    valid = alive & (first == jnp.arange(size))
    return draft.replace(parents=jnp.take_along_axis(first, draft.parents, 1).astype(jnp.int32), valid=valid)
