"""What a tree policy is: which drafted tokens are written on, and which of them become the draft.

B sequences, D depth, R0 children drawn behind the root, W rows of every later level, R children drawn behind each of
these, M candidates of one level (R0 or W * R), N = R0 + (D - 1) * W * R candidates of all levels, V vocabulary.

`parallax.decoding.grow` runs the model level by level. Level 0 draws R0 candidates behind the pending token, level i
draws R behind each of W rows, which the policy selected among the candidates of level i - 1. Candidates are numbered
through all levels, in the order of levels and rows; row r of level i is number (i - 1) * W + r of all rows. So a
candidate's number says behind which row it was drawn, and `front` [B, D * W], the candidate of every row, is the tree.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding.base import Kind, policy

LARGEST = 1024                     # nodes of a tree: more is a mistake, not a draft


class Drawn(NamedTuple):
    """The candidates behind the rows of one level, best first: tokens [B, W, R]; logp [B, W, R] their log-probability
    at their row; noisy [B, W, R] the same and the noise that they were drawn with (None if none was).

    logp is zero where neither the policy nor the controller reads it.
    """

    tokens: Int[Array, "B W R"]
    logp: Float[Array, "B W R"]
    noisy: Float[Array, "B W R"] | None


class Rows(NamedTuple):
    """What a policy knows of the rows that candidates are drawn behind: total [B, W] log-probability of the path down
    to the row; score [B, W], what `TreePolicy.score` gave it."""

    total: Float[Array, "B W"]
    score: Float[Array, "B W"]


@policy
class TreePolicy(abc.ABC):
    """A tree and how it grows. A subclass needs `depth`, `first`, `width`, `rest`, `select` and `assemble`.

    depth: D, levels of tokens. first: R0. width: W. rest: R.
    kinds: of drafts that may be grown so. scored: reads probabilities. certain: keeps every candidate that it has a
    place for.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic", "coupled", "sampled")
    scored: ClassVar[bool] = False
    certain: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def nodes(self) -> int:
        """Draft tokens."""

    @property
    def replacement(self) -> bool:
        """Whether siblings of sampled drafts are drawn independently."""
        return False

    def score(self, rows: Rows, drawn: Drawn) -> Float[Array, "B W R"]:
        """What candidates are compared by: the log-probability of the whole path. At most that of their row."""
        return rows.score[..., None] + drawn.logp

    def keep(self, drawn: Drawn) -> Bool[Array, "B W R"] | None:
        """Which candidates may stay; None for all."""
        return None

    @abc.abstractmethod
    def select(self, level, score: Float[Array, "B M"]) -> tuple[Int[Array, "B W"], Bool[Array, "B W"]]:
        """(which candidates of `level` are the rows of the next one, which of these there are at all).

        level: 0 as a Python int, later ones perhaps traced. The score of an invalid candidate is -inf.
        """

    @abc.abstractmethod
    def assemble(self, front: Int[Array, "B DW"], score: Float[Array, "B N"]) -> tuple[Any, Any, Any]:
        """(candidates of the nodes [T - 1] or [B, T - 1], parents of all T nodes, row behind which each internal node's
        children were drawn, 0 the root and r + 1 row r). Static where they are tuples."""

    def row_of(self, candidate):
        """The row behind which a candidate was drawn: 0 the root, r + 1 row r."""
        return jnp.where(candidate < self.first, 0, 1 + (candidate - self.first) // self.rest)


def at_least_one(part, *names: str) -> None:
    """Raises ValueError for an option below 1."""
    for name in names:
        value = getattr(part, name)
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def whole(values) -> bool:
    """Whether these are whole numbers."""
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def small_enough(nodes: int, what: str) -> None:
    """Raises ValueError for a tree that no forward should verify."""
    if nodes > LARGEST:
        raise ValueError(f"{what} has {nodes} nodes: expected at most {LARGEST}, make it narrower or less deep")

