"""Trees of draft tokens: shapes, depths, ancestor masks, and the walk that verification takes.

T nodes, row 0 the root (the pending token), D depth, K = D + 1, B sequences. A tree is `parents` [T] or [B, T] with
parents before children and parents[0] = 0; a chain is the tree in which every node's parent is the node before it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from parallax.decoding.base import Context, Draft, Verdict
from parallax.decoding.sampling import Seen
from parallax.models.cache import Block


@dataclasses.dataclass(frozen=True)
class Shape:
    """A static tree: parents, and each node's rank among its siblings (the root has rank 0)."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(int(d) for d in depths(np.asarray(self.parents), len(self.parents)))

    @property
    def depth(self) -> int:
        return max(self.depths)

    @classmethod
    def chain(cls, length: int) -> "Shape":
        """`length` tokens, one behind the other."""
        return cls((0, *range(length)), (0,) * (length + 1))

    @classmethod
    def paths(cls, paths: Iterable[tuple[int, ...]]) -> "Shape":
        """From sibling ranks along each path, as Medusa's choice lists: (0,), (1,), (0, 0), ... Prefixes are added."""
        nodes = sorted({path[:i] for path in paths for i in range(len(path) + 1)} | {()}, key=lambda p: (len(p), p))
        index = {path: i for i, path in enumerate(nodes)}
        return cls(tuple(index[path[:-1]] for path in nodes), tuple(path[-1] if path else 0 for path in nodes))

    @classmethod
    def levels(cls, widths: tuple[int, ...]) -> "Shape":
        """Every node of level d has widths[d] children."""
        return cls.paths(itertools.product(*map(range, widths)))

    @classmethod
    def best_first(cls, nodes: int, depth: int, acceptance: tuple) -> "Shape":
        """The `nodes` draft tokens most likely to be accepted, if a child of rank r is with probability acceptance[r].

        Or with acceptance[d][r] behind a node of depth d, the last of which holds for all deeper ones. Best-first
        growth by the product of these probabilities is the optimum for this model (that of Sequoia, arXiv:2402.12374):
        no token is more likely to be accepted than the one in front of it.
        """
        by_depth = acceptance if isinstance(acceptance[0], tuple) else (acceptance,)
        grown, heap = [], [(-1.0, ())]
        while heap and len(grown) <= nodes:
            score, path = heapq.heappop(heap)
            grown.append(path)
            if len(path) < depth:
                for rank, p in enumerate(by_depth[min(len(path), len(by_depth) - 1)]):
                    heapq.heappush(heap, (score * p, (*path, rank)))
        return cls.paths(grown)


def depths(parents, steps: int):
    """Depth of every node, [T] or [B, T], after at most `steps` levels. numpy in, numpy out."""
    xp = np if isinstance(parents, (tuple, np.ndarray)) else jnp
    parents = xp.asarray(parents)
    level = xp.zeros(parents.shape, xp.int32)
    moved = (xp.arange(parents.shape[-1]) != 0).astype(xp.int32)
    for _ in range(steps):                             # one level deeper than the parent, until nothing changes
        level = xp.take_along_axis(level, parents, -1) + moved
    return level


def ancestors(parents, steps: int):
    """[T, T] or [B, T, T] bool: row n sees itself and its ancestors. `steps` is the depth of the tree."""
    xp = np if isinstance(parents, (tuple, np.ndarray)) else jnp
    parents = xp.asarray(parents)
    size = parents.shape[-1]
    seen = xp.broadcast_to(xp.eye(size, dtype=bool), (*parents.shape, size))
    for _ in range(steps):
        seen = seen | xp.take_along_axis(seen, parents[..., None], -2)
    return seen


def block(draft: Draft, length: Int[Array, "B"]) -> Block:
    """The forward's rows for a draft: a node sits `depth` positions behind the pending token and sees its ancestors."""
    positions = length[:, None] - 1 + jnp.asarray(depths(draft.parents, draft.depth))
    return Block(draft.tokens, positions, jnp.asarray(ancestors(draft.parents, draft.depth)))


def seen(draft: Draft, ctx: Context) -> Seen:
    """The text in front of what the target says at every node: what is decided, and the drafts down to the node."""
    size = draft.tokens.shape[1]
    above = jnp.broadcast_to(jnp.asarray(ancestors(draft.parents, draft.depth)), (*draft.tokens.shape, size))
    path = jnp.broadcast_to(draft.tokens[:, None], above.shape)
    return Seen(ctx.tokens, ctx.length, path[..., 1:], above[..., 1:])


def deepest(draft: Draft, accepted: Bool[Array, "B T"]) -> Int[Array, "B"]:
    """The deepest node that is accepted together with all its ancestors; of equally deep ones the lowest index.

    The root always is accepted, an invalid node never.
    """
    batch, size = draft.tokens.shape
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), (batch, size))
    level = jnp.broadcast_to(jnp.asarray(depths(draft.parents, draft.depth)), (batch, size))
    alive = hit = draft.valid & accepted | (level == 0)
    for _ in range(draft.depth):
        alive = hit & jnp.take_along_axis(alive, parents, 1)
    return jnp.argmax(jnp.where(alive, level, -1), 1).astype(jnp.int32)


def verdict(draft: Draft, node: Int[Array, "B"], following: Int[Array, "B"],
            targets: Int[Array, "B T"] | None = None) -> Verdict:
    """The verdict that accepts the path down to `node` and emits `following` behind it."""
    batch, size = draft.tokens.shape
    level = jnp.broadcast_to(jnp.asarray(depths(draft.parents, draft.depth)), (batch, size))
    above = jnp.broadcast_to(jnp.asarray(ancestors(draft.parents, draft.depth)), (batch, size, size))
    above = jnp.take_along_axis(above, node[:, None, None], 1)[:, 0]                      # [B, T]
    path = [jnp.argmax(above & (level == d), 1).astype(jnp.int32) for d in range(draft.depth + 1)]
    count = jnp.take_along_axis(level, node[:, None], 1)[:, 0] + 1
    return Verdict(jnp.stack(path, 1), count, following, node, targets)


def walk(draft: Draft, targets: Int[Array, "B T"]) -> Verdict:
    """Follows the target's tokens from the root as deep as the tree has them.

    targets: the token that the target puts behind every node. Of equally deep accepted nodes (duplicate siblings) the
    one with the lowest index is taken.
    """
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    node = deepest(draft, draft.tokens == jnp.take_along_axis(targets, parents, 1))
    return verdict(draft, node, jnp.take_along_axis(targets, node[:, None], 1)[:, 0], targets)


def by_depth(draft: Draft, verdict: Verdict) -> tuple[Int[Array, "B D"], Int[Array, "B D"]]:
    """(1 where a token was accepted at depth 1, 2, ..., 1 where the draft offered one there).

    Offered means: a valid child of the node that was accepted one level above.
    """
    batch, size = draft.tokens.shape
    depth = jnp.arange(1, draft.depth + 1)
    accepted = depth < verdict.count[:, None]
    reached = depth <= verdict.count[:, None]
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), (batch, size))
    child = draft.valid & (jnp.arange(size) > 0)
    offered = (child[:, None] & (parents[:, None] == verdict.path[:, :draft.depth, None])).any(-1)
    return accepted.astype(jnp.int32), (reached & offered).astype(jnp.int32)
