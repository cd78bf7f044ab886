"""Trees whose shape is known before anything is drafted. B sequences, W rows of a level, R children of a row."""

from __future__ import annotations

import abc
import functools
import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from parallax.decoding.base import Kind, policy, static
from parallax.decoding.growth.base import TreePolicy, at_least_one, small_enough, whole
from parallax.decoding.tree import Shape

# How often the next token of `tiny-python` was the one of each rank of its draft model: 128 tokens, written greedily,
# behind each of benchmarks/prompts/python.jsonl.
ACCEPTANCE = (0.62, 0.10, 0.07, 0.04)


class Layout(NamedTuple):
    """Where the nodes of a shape lie among the candidates: rows [D, W] candidate (within its level) of every row of
    levels 1 to D, -1 where a level has fewer; candidates [T - 1] of the nodes; drawn [I] the row behind which the
    children of each node were drawn."""

    first: int
    width: int
    rest: int
    rows: np.ndarray
    candidates: tuple[int, ...]
    drawn: tuple[int, ...]


@policy
class Fixed(TreePolicy):
    """A static shape. A subclass needs `shape`."""

    @property
    @abc.abstractmethod
    def shape(self) -> Shape:
        """The tree."""

    @functools.cached_property
    def layout(self) -> Layout:
        return lay_out(self.shape)

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def nodes(self) -> int:
        return len(self.shape.parents) - 1

    @property
    def first(self) -> int:
        return self.layout.first

    @property
    def width(self) -> int:
        return self.layout.width

    @property
    def rest(self) -> int:
        return self.layout.rest

    def select(self, level, score):
        index = jnp.asarray(self.layout.rows)[level]
        there = jnp.broadcast_to(index >= 0, (score.shape[0], self.width))
        return jnp.broadcast_to(jnp.maximum(index, 0), there.shape), there

    def assemble(self, front, score):
        return self.layout.candidates, self.shape.parents, self.layout.drawn


def lay_out(shape: Shape) -> Layout:
    """Only nodes with children are rows: a leaf is never put through the model."""
    parents, ranks, depths = shape.parents, shape.ranks, shape.depths
    inner = sorted(set(parents[1:]))
    levels = [[node for node in inner if depths[node] == d] for d in range(1, shape.depth + 1)]
    width = max(1, *map(len, levels))
    first = 1 + max(rank for rank, depth in zip(ranks, depths) if depth == 1)
    rest = 1 + max((rank for rank, depth in zip(ranks, depths) if depth > 1), default=0)
    row = {node: 1 + i * width + w for i, level in enumerate(levels) for w, node in enumerate(level)}

    def candidate(node):
        parent = parents[node]
        return ranks[node] if parent == 0 else first + (row[parent] - 1) * rest + ranks[node]

    rows = np.full((shape.depth, width), -1, np.int32)
    for i, level in enumerate(levels):
        before = 0 if i == 0 else first + (i - 1) * width * rest
        rows[i, :len(level)] = [candidate(node) - before for node in level]
    drawn = tuple(row.get(node, 0) for node in range(inner[-1] + 1))
    return Layout(first, width, rest, rows, tuple(candidate(node) for node in range(1, len(parents))), drawn)


@policy
class Chain(Fixed):
    """One token after the other.

    Attributes:
      length: how many.
    """

    length: int = static(default=4)

    def __post_init__(self):
        at_least_one(self, "length")
        small_enough(self.length, f"a chain of {self.length}")

    @functools.cached_property
    def shape(self):
        return Shape.chain(self.length)


@policy
class Levels(Fixed):
    """Every node of a level has the same number of children.

    With sampled drafts the children of a node are drawn without replacement, best first by Gumbel-top-k: RSD-C
    (Jeon et al., arXiv:2402.14160). With `replacement` they are drawn independently: MCSD (arXiv:2401.06706).

    Attributes:
      widths: children per node of each level, all of them in one list: `levels(4, 2, 2)`.
      replacement: whether siblings of a sampled draft are independent.
    """

    star: ClassVar[str] = "widths"
    widths: tuple[int, ...] = static(default=(2, 2, 1))
    replacement: bool = static(default=False)

    def __post_init__(self):
        if not self.widths or not whole(self.widths) or min(self.widths) < 1:
            raise ValueError(f"widths must be at least 1 child in at least one level, got {self.widths}")
        small_enough(sum(math.prod(self.widths[:d + 1]) for d in range(len(self.widths))), f"levels{self.widths}")

    @functools.cached_property
    def shape(self):
        return Shape.levels(self.widths)


@policy
class Paths(Fixed):
    """Independent chains from the root, as `K-SEQ` (SpecTr, arXiv:2310.15141) and multi-path rules want them.

    A sampled draft draws the first tokens of the paths independently; others take the best of them.

    Attributes:
      count: chains.
      length: tokens of each.
    """

    count: int = static(default=3)
    length: int = static(default=4)

    replacement: ClassVar[bool] = True

    def __post_init__(self):
        at_least_one(self, "count", "length")
        small_enough(self.count * self.length, f"paths({self.count}, {self.length})")

    @functools.cached_property
    def shape(self):
        return Shape.levels((self.count,) + (1,) * (self.length - 1))


@policy
class Delayed(Fixed):
    """A trunk that branches once: delayed tree expansion. Branching near the root wastes nodes where the draft is sure.

    Attributes:
      trunk: tokens of the one chain in front.
      count: branches behind it.
      length: tokens of each branch.
      replacement: whether the first tokens of a sampled draft's branches are independent.
    """

    trunk: int = static(default=2)
    count: int = static(default=3)
    length: int = static(default=2)
    replacement: bool = static(default=False)

    def __post_init__(self):
        at_least_one(self, "trunk", "count", "length")
        small_enough(self.trunk + self.count * self.length, f"delayed({self.trunk}, {self.count}, {self.length})")

    @functools.cached_property
    def shape(self):
        return Shape.levels((1,) * self.trunk + (self.count,) + (1,) * (self.length - 1))


@policy
class Static(Fixed):
    """A tree that is written down, as Medusa's choices are: `static((0,), (1,), (0, 0))`.

    Attributes:
      paths: the sibling ranks down to every node, all of them in one list; what lies above a node is added.
    """

    star: ClassVar[str] = "paths"
    paths: tuple[tuple[int, ...], ...] = static(default=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))

    def __post_init__(self):
        good = all(isinstance(path, tuple) and path and whole(path) and min(path) >= 0 for path in self.paths)
        if not self.paths or not good:
            raise ValueError("paths must be ranks from 0 down to each node, as in static((0,), (0, 0)), got "
                             f"{self.paths}")
        small_enough(len(self.paths), "the tree")
        ranks: dict[int, set[int]] = {}
        for parent, rank in list(zip(self.shape.parents, self.shape.ranks))[1:]:
            ranks.setdefault(parent, set()).add(rank)
        # A sibling that was drawn and left out would change the law of those behind it.
        if any(len(found) <= max(found) for found in ranks.values()):
            raise ValueError(f"siblings must have the ranks 0, 1, ... without a gap, got {self.paths}")

    @functools.cached_property
    def shape(self):
        return Shape.paths(self.paths)


@policy
class Sequoia(Fixed):
    """The shape whose expected accepted length is greatest, from how often the token of each rank is the target's.

    Source: Sequoia (Chen et al., arXiv:2402.12374). `parallax.decoding.acceptance.measure` measures the numbers.

    Attributes:
      nodes: draft tokens.
      max_depth: longest branch.
      acceptance: by rank, or by depth and rank (a tuple of tuples, the last of which holds for all deeper levels).
    """

    nodes: int = static(default=7)
    max_depth: int = static(default=5)
    acceptance: tuple = static(default=ACCEPTANCE)

    def __post_init__(self):
        at_least_one(self, "nodes", "max_depth")
        small_enough(self.nodes, "the tree")
        levels = self.acceptance if isinstance((*self.acceptance, 0)[0], tuple) else (self.acceptance,)
        if not levels or not all(isinstance(level, tuple) and level and all(
                isinstance(p, float | int) and 0 <= p <= 1 for p in level) for level in levels):
            raise ValueError("acceptance must be probabilities by rank, or by depth and rank, got "
                             f"{self.acceptance}")
        if len(self.shape.parents) <= self.nodes:
            raise ValueError(f"there are only {len(self.shape.parents) - 1} nodes of {self.max_depth} levels and "
                             f"{max(map(len, levels))} ranks, got nodes={self.nodes}: give more levels or ranks")

    @functools.cached_property
    def shape(self):
        # A sibling that was drawn and left out would change the law of those behind it, so no rank counts more than the
        # one in front of it: if it was measured so, that is noise.
        levels = self.acceptance if isinstance(self.acceptance[0], tuple) else (self.acceptance,)
        falling = tuple(tuple(np.minimum.accumulate(level).tolist()) for level in levels)
        return Shape.best_first(self.nodes, self.max_depth, falling)


@policy
class Confident(Fixed):
    """A chain of most likely tokens, with the runners-up as leaves beside it where the draft is unsure: CaPE.

    The bands follow the shape of the paper's table (GliDe with a CaPE, arXiv:2402.02082), with fewer siblings.

    Attributes:
      length: of the chain.
      bands: upper bounds of the probability of the chain's token, rising; above the last one there are no siblings.
      siblings: how many there are in each band.
    """

    length: int = static(default=4)
    bands: tuple[float, ...] = (0.3, 0.6, 0.8)
    siblings: tuple[int, ...] = static(default=(3, 2, 1))

    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic",)
    scored: ClassVar[bool] = True
    certain: ClassVar[bool] = False

    def __post_init__(self):
        at_least_one(self, "length")
        if len(self.bands) != len(self.siblings) or not self.siblings:
            raise ValueError(f"bands and siblings must be equally many, got {self.bands} and {self.siblings}")
        if not whole(self.siblings) or min(self.siblings) < 0 or max(self.siblings) < 1:
            raise ValueError(f"siblings must be whole numbers from 0, not all of them 0, got {self.siblings}")
        known = all(isinstance(bound, float | int) for bound in self.bands)             # and no tracers
        if known and list(self.bands) != sorted(self.bands) or any(isinstance(x, str | tuple) for x in self.bands):
            raise ValueError(f"bands must be rising upper bounds of a probability, got {self.bands}")
        small_enough(self.nodes, "the tree")

    @functools.cached_property
    def shape(self):
        ranks = range(1 + max(self.siblings))
        return Shape.paths([(0,) * d + (rank,) for d in range(self.length) for rank in ranks])

    def keep(self, drawn):
        sure = jnp.exp(drawn.logp[..., :1])                                                     # [B, W, 1]
        count = jnp.zeros(sure.shape, jnp.int32)
        for bound, siblings in reversed(list(zip(self.bands, self.siblings))):
            count = jnp.where(sure < bound, siblings, count)
        return jnp.arange(drawn.logp.shape[-1]) <= count
