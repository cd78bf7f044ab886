"""Trees that grow where the draft model thinks that it pays. B sequences, W rows of a level, R children of a row."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from parallax.decoding.base import Kind, policy, static
from parallax.decoding.growth.base import TreePolicy, at_least_one, small_enough


@policy
class Widest(TreePolicy):
    """Every level keeps the `width` best candidates of all its rows, each of which has as many children."""

    width: int = static(default=4)
    depth: int = static(default=4)

    scored: ClassVar[bool] = True

    def __post_init__(self):
        at_least_one(self, "width", "depth")
        small_enough(self.nodes, "the tree")

    @property
    def first(self) -> int:
        return self.width

    @property
    def rest(self) -> int:
        return self.width

    @property
    def nodes(self) -> int:
        return self.width * self.depth

    def select(self, level, score):
        best, index = lax.top_k(score, self.width)
        return index, best > -jnp.inf


@policy
class Beam(Widest):
    """Dynamic tree: expand the likeliest paths of every level, then keep the likeliest nodes of all.

    A node never counts more than the one in front of it, and has the higher number, so the nodes that are kept make a
    tree, also where a probability is 1. What stays depends on what was drafted, so the tree is deterministic: verify
    it with `Follow`. Source: EAGLE-2 (arXiv:2406.16858), where width is 10, depth 6 and nodes 60, for accelerators.

    Attributes:
      width: paths that go on at every level, and children of each.
      depth: levels.
      nodes: draft tokens that are kept.
    """

    nodes: int = static(default=15)

    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic",)

    def __post_init__(self):
        super().__post_init__()
        at_least_one(self, "nodes")
        most = self.width + (self.depth - 1) * self.width ** 2
        if self.nodes > most:
            raise ValueError(f"a beam of width {self.width} and depth {self.depth} has {most} nodes to keep, got "
                             f"nodes={self.nodes}")

    def assemble(self, front, score):
        chosen = jnp.sort(lax.top_k(score, self.nodes)[1], -1)
        row = self.row_of(chosen)
        above = jnp.take_along_axis(front, jnp.maximum(row - 1, 0), 1)                 # the candidate of that row
        parents = 1 + jnp.argmax(chosen[:, None] == above[:, :, None], -1)
        parents = jnp.where(row == 0, 0, parents)
        return chosen, jnp.pad(parents, ((0, 0), (1, 0))).astype(jnp.int32), None


@policy
class StochasticBeam(Widest):
    """Samples `width` different paths without replacement, level by level: stochastic beam search, RSD-S.

    Every path has a perturbed score, Gumbel noise around its log-probability, drawn so that the greatest of a node's
    children has the score of the node. The greatest scores of a level go on, and siblings are in the order of their
    scores, which is the order in which they would have been drawn one after the other. Only that score may decide what
    goes on; by probability it would be a pruned tree. Source: RSD (Jeon et al., arXiv:2402.14160) on Kool et al.
    (arXiv:1903.06059).

    Attributes:
      width: paths of every level.
      depth: levels.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("sampled",)

    def score(self, rows, drawn):
        perturbed = rows.total[..., None] + drawn.noisy
        return condition(rows.score[..., None], perturbed[..., :1], perturbed)

    def assemble(self, front, score):
        row = self.row_of(front)
        parents = jnp.pad(row, ((0, 0), (1, 0))).astype(jnp.int32)
        return front, parents, tuple(range(1 + self.width * (self.depth - 1)))


def condition(target, greatest, values):
    """Gumbel values whose maximum is `greatest`, as they are if the maximum is `target`. Keeps their order.

    -log(exp(-target) - exp(-greatest) + exp(-value)), in the stable form of Kool et al., appendix B.3.
    """
    gap = jnp.minimum(values - greatest, 0)
    v = target - values + jnp.log1p(-jnp.exp(gap))
    moved = target - jnp.maximum(v, 0) - jnp.log1p(jnp.exp(-jnp.abs(v)))
    return jnp.where(values == -jnp.inf, -jnp.inf, jnp.where(gap == 0, target, moved))
