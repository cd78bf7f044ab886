"""Rules and drafts that look right and are not. A test of laws that passes one of them proves nothing.

R outcomes, B sequences, T nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from parallax.decoding import tree
from parallax.decoding.base import Verifier, policy
from parallax.decoding.sampling import Sample
from parallax.decoding.tree import Shape
from parallax.decoding.verify import Judge, Judgement, KSeq, MultiPath, Rejection, Traversal
from parallax.decoding.verify.judge import parents_of, row
from parallax.testing.enumerate import Source, enumerate_law, levels, random_tables

SAMPLER = Sample()
PATHS = levels(2, 1)


def weak_dropped(chances):
    """Drops a drafted token, and what is behind it, because it is unlikely. To stop *behind* it would be right."""
    return jnp.cumprod(chances >= 0.4, 1) > 0


def pruned(chances):
    """Keeps the likely paths of a tree of `PATHS`, as a tree that is verified as a deterministic one may."""
    score = functools.reduce(lambda score, _: chances * score[:, jnp.asarray(PATHS.parents)],
                             range(PATHS.depth), jnp.ones_like(chances))
    return score >= 0.3


def tied(chances):
    """Ends every path behind its first token if none of the first tokens is likely. To ask only its own would be right.
    """
    likely = (chances[:, 1:3] >= 0.4).any(1, keepdims=True)
    return jnp.where(jnp.arange(chances.shape[1]) > 2, likely, True)


def most_likely(shape: Shape, replacement: bool, q, tokens):
    """Not drawn at all: every node's children are the most likely tokens of q."""
    chances = [jnp.ones(len(tokens))]
    for parent, rank, node in zip(shape.parents[1:], shape.ranks[1:], range(1, len(tokens[0]))):
        law = q[0] if parent == 0 else q[1][tokens[:, parent]]
        best = jnp.broadcast_to(jnp.argsort(-law, -1), (len(tokens), law.shape[-1]))[:, rank]
        chances.append((tokens[:, node] == best).astype(law.dtype))
    return jnp.stack(chances, 1)


def hotter(logq):
    """Says that tokens were drawn at twice their temperature."""
    return jax.nn.log_softmax(logq / 2, -1)


@policy
class Unaware(MultiPath):
    """Chooses the best path and judges it as if it were the only one."""

    @staticmethod
    def _law(logp, logq, tokens, count, paths):
        return logq


@policy
class PerPath(Judge):
    """Draws the target's tokens once for every path, not for every node, and takes the longest match: paths that share
    a node try several times there. For paths that meet only in the root.
    """

    def judge(self, draft, logp, uniform):
        parents, rows, size = parents_of(draft), jnp.arange(len(logp)), draft.tokens.shape[1]
        chances = jnp.exp(logp[rows[:, None], parents, draft.tokens])
        node = tree.deepest(draft, uniform < chances)
        child = (jnp.arange(size) > 0) & (parents == node[:, None])
        missed = jnp.where(child.any(1), draft.tokens[rows, jnp.argmax(child, 1)], -1)        # by the path that counts
        weights = jnp.where(jnp.arange(logp.shape[2]) == missed[:, None], 0, jnp.exp(row(logp, node)))
        return Judgement(node, weights, chances)


@policy
class Misweighted(Traversal):
    """Divides what is left of p by what is left of q, where S / (S + 1 - alpha) is right."""

    @staticmethod
    def _keep(rest, alpha, q, token):
        left = 1 - jnp.exp(jnp.take_along_axis(q, token[:, None], 1)[:, 0])
        return jnp.log(jnp.minimum(rest / jnp.where(left > 0, left, 1), 1))


@policy
class Greedier(KSeq):
    """Accepts with p / q, rho = 1, however many siblings there are."""

    def _threshold(self, p, q, count):
        return jnp.ones_like(count)


def distance(verifier: Verifier, source: Source, count: int = 6) -> float:
    """The largest total variation distance from the target's law over `count` random tables."""
    return float(enumerate_law(verifier, source, random_tables(count=count)).tv.max())


CONTROLS: dict[str, Callable[[], float]] = {
    name: functools.partial(distance, rule(sampler=SAMPLER), source) for name, rule, source in [
        ("weak drafted token dropped", Rejection, Source(Shape.chain(2), valid=weak_dropped)),
        ("sampled tree pruned by probability", Rejection, Source(PATHS, valid=pruned)),
        ("q logged at another temperature", Rejection, Source(Shape.chain(2), logged=hotter)),
        ("best of two paths verified as one", Unaware, Source(PATHS, replacement=True)),
        ("paths that end by each other's tokens", MultiPath, Source(PATHS, replacement=True, valid=tied)),
        ("most likely tokens verified by p / q", Rejection, Source(PATHS, chance=most_likely)),
        ("one target sample per path", PerPath, Source(PATHS, replacement=True)),
        ("traversal with another alpha", Misweighted, Source(PATHS)),
        ("K-SEQ with rho 1", Greedier, Source(levels(2), replacement=True)),
    ]
}
