"""Greedy multi-path block verification. B sequences, K paths, D depth, T = 1 + K D nodes, V vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.decoding.base import Draft, policy
from parallax.decoding.verify.block import joint
from parallax.decoding.verify.judge import (
    Judge,
    Judgement,
    drawn,
    independent,
    static_parents,
)

HEAVY = 512                              # no more tokens have a probability of at least its inverse


@policy
class MultiPath(Judge):
    """Choose the most promising of K independent paths and judge it as a chain.

    Behind every beginning tokens are ranked by p / q, and paths are compared by the ranks of their tokens, first token
    first (see `rank`; any order would do). The best of K paths has a law that can be written down: if a path drawn from
    q comes before a beginning with probability F-, and before or with it with F, the best one begins so with
    F^K - F-^K. With these laws as q, the best path goes through block verification. K counts the paths that are valid;
    they may end early if where they end depends on the tokens of the path in front alone. With one path this is
    `Block`.

    Source: the idea is that of greedy multi-path block verification (arXiv:2602.16961), whose exact algorithm may
    differ.
    """

    def check(self, source):
        super().check(source)
        independent(self, source)
        if isinstance(source, Draft):
            chains(source)

    def judge(self, draft, logp, uniform):
        nodes = chains(draft)                                                                       # [K, D]
        rows, live = jnp.arange(len(logp))[:, None], drawn(draft)
        contexts = np.concatenate([np.zeros_like(nodes[:, :1]), nodes[:, :-1]], 1)
        best = jnp.zeros((len(logp),), jnp.int32)
        for path in range(1, len(nodes)):
            best = jnp.where(self._better(draft, logp, live, nodes, contexts, best, path), path, best)
        path = jnp.asarray(nodes)[best]                                                             # [B, D]
        context = jnp.asarray(contexts)[best]
        tokens, length = draft.tokens[rows, path], live[rows, path].sum(1)
        p, q = logp[rows, context], draft.logq[rows, context]
        q = self._law(p, q, tokens, live[:, nodes[:, 0]].sum(1), len(nodes))
        ratio = jnp.take_along_axis(p - q, tokens[..., None], 2)[..., 0]
        p = jnp.concatenate([p, logp[rows, path[:, -1:]]], 1)
        kept, weights, chances = joint(p, q, ratio, length, uniform[rows, path])
        node = jnp.where(kept > 0, path[rows[:, 0], kept - 1], 0)
        return Judgement(node, weights, jnp.zeros_like(uniform).at[rows, path].set(chances))

    @staticmethod
    def _better(draft, logp, live, nodes, contexts, best, path):
        """[B], whether a path comes behind the best one so far in the order of ranks; an equal one does not."""
        rows = jnp.arange(len(logp))[:, None]
        ours, theirs, context = nodes[path], jnp.asarray(nodes)[best], jnp.asarray(contexts)[best]
        token, other = draft.tokens[:, ours], draft.tokens[rows, theirs]

        def ranked(token):                             # by the same rows for both: equal beginnings have equal laws
            return rank(logp[rows, context, token], draft.logq[rows, context, token])

        differ = (token != other) & live[:, ours] & live[rows, theirs]
        first = differ & (jnp.cumsum(differ, 1) == 1)
        ahead = (ranked(token) > ranked(other)) | (ranked(token) == ranked(other)) & (token > other)
        return live[:, ours[0]] & ((first & ahead).any(1) | ~live[rows, theirs][:, 0])

    @staticmethod
    def _law(logp: Float[Array, "B D V"], logq: Float[Array, "B D V"], tokens: Int[Array, "B D"],
             count: Int[Array, "B"], paths: int) -> Float[Array, "B D V"]:
        """Log-law of the best path's tokens, each behind the ones before it.

        Worked out within the mass of the beginning: with F = 1, `low` is F- and `width` F - F-, so nothing underflows
        however unlikely a long beginning is. The difference of two K-th powers is the difference of the numbers times
        `_powers`.
        """
        low, width = jnp.zeros_like(logp[:, 0, :1]), jnp.ones_like(logp[:, 0, :1])
        laws = []
        for d in range(tokens.shape[1]):
            q, upto = jnp.exp(logq[:, d]), mass_upto(logp[:, d], logq[:, d])
            upper, lower = low + width * upto, low + width * (upto - q)
            gain = _powers(upper, lower, count, paths) / _powers(jnp.ones_like(low), low, count, paths)
            laws.append(jax.nn.log_softmax(logq[:, d] + jnp.log(gain), -1))
            chosen = tokens[:, d, None]
            top, mass = (jnp.take_along_axis(x, chosen, 1) for x in (upper, q))
            low, width = jnp.take_along_axis(lower, chosen, 1) / top, width * mass / top
        return jnp.stack(laws, 1)


def rank(logp: Float[Array, "*lead"], logq: Float[Array, "*lead"]) -> Float[Array, "*lead"]:
    """What tokens are ordered by, and by their ids where it is equal: log p / q for those of q above 1 / `HEAVY`.

    The others are many and drawn seldom. They come before all these or, if p is above q, behind them; for to sort a
    whole vocabulary takes longer than all the rest.
    """
    ratio = logp - logq
    return jnp.where(logq >= -np.log(HEAVY), jnp.clip(ratio, -1e9, 1e9), jnp.where(ratio >= 0, jnp.inf, -jnp.inf))


def mass_upto(logp: Float[Array, "B V"], logq: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The mass under q of every token and of all that come before it in the order of `rank`."""
    size, order, q = logq.shape[-1], rank(logp, logq), jnp.exp(logq)
    first, last = order == -jnp.inf, order == jnp.inf
    _, token = lax.top_k(logq, min(HEAVY, size))                  # all of the middle, and more
    middle = jnp.take_along_axis(~first & ~last, token, 1)
    key = jnp.where(middle, jnp.take_along_axis(order, token, 1), jnp.inf)
    mass = jnp.where(middle, jnp.take_along_axis(q, token, 1), 0)
    _, token, mass = lax.sort((key, jnp.where(middle, token, size), mass), num_keys=2)
    start, front = jnp.cumsum(mass, -1), jnp.cumsum(jnp.where(first, q, 0), -1)
    start = start + front[:, -1:]
    upto = jnp.zeros_like(q).at[jnp.arange(len(q))[:, None], token].set(start, mode="drop")
    return jnp.where(first, front, jnp.where(last, start[:, -1:] + jnp.cumsum(jnp.where(last, q, 0), -1), upto))


def _powers(upper, lower, count: Int[Array, "B"], most: int):
    """sum of upper^j lower^(K-1-j) over j < K = count[b], which is (upper^K - lower^K) / (upper - lower)."""
    total, power = jnp.zeros_like(upper), jnp.ones_like(upper)
    for k in range(most):
        total = jnp.where(k < count[:, None], total * lower + power, total)
        power = power * upper
    return total


def chains(draft: Draft) -> np.ndarray:
    """The nodes [K, D] of K chains behind the root. Raises ValueError for any other tree."""
    parents, paths = static_parents(draft), []
    for head in [n for n, parent in enumerate(parents or ()) if n and parent == 0]:
        path = [head]
        while following := [n for n, parent in enumerate(parents) if n and parent == path[-1]]:
            path.append(following[0])
        paths.append(path)
    if not paths or any(len(path) != draft.depth for path in paths) or sum(map(len, paths)) != len(parents) - 1:
        raise ValueError("MultiPath verifies paths of equal length that meet only in the root: draw a tree of widths "
                         f"(K, 1, 1, ...) with replacement, or use Traversal; got parents {parents or 'of each step'}")
    return np.asarray(paths)
