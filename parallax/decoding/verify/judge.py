"""What the rules for drawn drafts share. B sequences, T nodes, V vocabulary.

Such a rule compares the law of the target, p, with the law that the draft was drawn from, q. It is a pure function of
the two and of one uniform number per node, and it says with which chance every number could have decided otherwise. So
the law of what it emits can be computed, by going through all outcomes of the numbers, with the very code that runs in
the loop (see `parallax.testing.enumerate`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding import tree
from parallax.decoding.base import Context, Draft, Drafter, Guarantee, Kind, Verifier, policy
from parallax.decoding.sampling import ACCEPT, RESIDUAL, Greedy, Sampler, argmax, noise_private, private_keys


class Judgement(NamedTuple):
    """node [B]: the last accepted node; weights [B, V]: the law of the token behind it, up to a factor;
    chances [B, T]: the number of node n was compared with chances[:, n]: it said yes if it was below. Anything in
    [0, 1] where it decided nothing. A number that has decided is not used again.
    """

    node: Int[Array, "B"]
    weights: Float[Array, "B V"]
    chances: Float[Array, "B T"]


@policy
class Judge(Verifier, abc.ABC):
    """A rule that judges drawn drafts by p and q. A subclass needs `judge`.

    Attributes:
      sampler: the target's law.
    """

    sampler: Sampler

    guarantee: ClassVar[Guarantee] = "distribution"
    kinds: ClassVar[tuple[Kind, ...]] = ("sampled",)

    def check(self, source):
        if isinstance(self.sampler, Greedy):
            raise ValueError(f"{type(self).__name__} needs a temperature above 0: at temperature 0 use Follow, which "
                             "is the same")
        super().check(source)
        if isinstance(source, Draft) and source.logq is None:
            raise ValueError(f"{type(self).__name__} compares p with q, and this draft has no logq (q missing): log "
                             "the law that its tokens were drawn from, or use Follow")

    @abc.abstractmethod
    def judge(self, draft: Draft, logp: Float[Array, "B T V"], uniform: Float[Array, "B T"]) -> Judgement:
        """The decision. `logp` are the target's log-probabilities behind every node, `uniform` numbers in [0, 1)."""

    def __call__(self, draft, logits, hidden, ctx):
        start, uniform = ctx.length, numbers(draft, ctx)
        logp = jax.nn.log_softmax(self.sampler.warp(logits, tree.seen(draft, ctx)), -1)
        judgement = self.judge(draft, logp, uniform)
        noise = noise_private(ctx.key, start, start, RESIDUAL, logits.shape[-1])
        return tree.verdict(draft, judgement.node, argmax(jnp.log(judgement.weights) + noise))


def numbers(draft: Draft, ctx: Context) -> Float[Array, "B T"]:
    """The uniform numbers of this step, one per node."""
    start = ctx.length

    def number(node):
        return jax.vmap(jax.random.uniform)(private_keys(ctx.key, start, jnp.full_like(start, node), ACCEPT))

    return jax.vmap(number, out_axes=1)(jnp.arange(draft.tokens.shape[1]))


def parents_of(draft: Draft) -> Int[Array, "B T"]:
    """The parents of every sequence's tree."""
    return jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)


def static_parents(draft: Draft) -> tuple[int, ...] | None:
    """The parents, if they are known before the program runs."""
    known = isinstance(draft.parents, (tuple, list, np.ndarray)) and np.ndim(draft.parents) == 1
    return tuple(int(parent) for parent in draft.parents) if known else None


def independent(rule: Judge, source: Drafter | Draft) -> None:
    """Raises ValueError for a tree whose siblings were not drawn independently of each other."""
    if isinstance(source, Draft) and not source.replacement:
        parents = static_parents(source)
        if parents is None or len(set(parents[1:])) < len(parents[1:]):
            raise ValueError(f"{type(rule).__name__} verifies siblings drawn with replacement, these were drawn "
                             "without: draw the tree with replacement=True, or use Rejection or Traversal")


def row(values: Float[Array, "B T ..."], node: Int[Array, "B"]) -> Float[Array, "B ..."]:
    """values[b, node[b]], of the last row for nodes beyond it: these have no children, so nobody asks for their q."""
    return values[jnp.arange(len(node)), jnp.minimum(node, values.shape[1] - 1)]


def log_ratio(draft: Draft, logp: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """log p / q of every node's token, by the laws behind its parent."""
    batch, parents = jnp.arange(len(draft.tokens))[:, None], parents_of(draft)
    logq = draft.logq[batch, jnp.minimum(parents, draft.logq.shape[1] - 1), draft.tokens]
    return logp[batch, parents, draft.tokens] - logq


def drawn(draft: Draft) -> Bool[Array, "B T"]:
    """The nodes that were drawn from q, down from the root; the root is one.

    Of siblings without replacement only the last may be missing: a later one was drawn where an earlier was taken out.
    A token of probability 0, or one that an earlier sibling took out, fills a place for which nothing was left. Whether
    it does depends on how much there was to draw, not on what was drawn, so the node counts as missing.
    """
    batch, size = draft.tokens.shape
    parents, index = parents_of(draft), jnp.arange(size)
    logq = draft.logq[jnp.arange(batch)[:, None], jnp.minimum(parents, draft.logq.shape[1] - 1), draft.tokens]
    alive = draft.valid & (parents < draft.logq.shape[1]) & (logq > -jnp.inf)
    if not draft.replacement:
        same = (parents[:, :, None] == parents[:, None]) & (draft.tokens[:, :, None] == draft.tokens[:, None])
        earlier = (index[None] < index[:, None]) & (index[None] > 0)
        alive = alive & ~(same & earlier & alive[:, None]).any(-1)
    hit = alive = alive | (index == 0)
    for _ in range(draft.depth):
        alive = hit & jnp.take_along_axis(alive, parents, 1)
    return alive


def log_residual(logp: Float[Array, "B V"], logq: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """log [p - q]+, not normalised. Nothing underflows."""
    above = logp > logq
    return jnp.where(above, logp + jnp.log(-jnp.expm1(jnp.where(above, logq - logp, -1))), -jnp.inf)


def normalised(logs: Float[Array, "B V"], otherwise: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The log-probabilities that are proportional to exp(logs); `otherwise` where nothing has any."""
    total = jax.nn.logsumexp(logs, -1, keepdims=True)
    return jnp.where(total > -jnp.inf, logs - total, otherwise)


def without(logq: Float[Array, "B V"], token: Int[Array, "B"]) -> Float[Array, "B V"]:
    """The law of the next sibling without replacement."""
    rest = logq.at[jnp.arange(len(token)), token].set(-jnp.inf)
    return normalised(rest, rest)


def descend(draft: Draft, uniform: Float[Array, "B T"], arrive: Callable, chance: Callable, reject: Callable):
    """Goes down from the root: tries the children of a node one after the other, moves to the first that is accepted.

    Args:
      draft, uniform: as for `Judge.judge`.
      arrive: (nodes [B]) -> what the rule must know there, arrays with a leading B.
      chance: (state, tokens [B]) -> [B], of accepting a child with this token.
      reject: (state, tokens [B]) -> the state after that child was rejected.

    Returns:
      (last accepted node [B], its state, chances [B, T]).
    """
    batch, size = draft.tokens.shape
    rows, index, parents, live = jnp.arange(batch), jnp.arange(size), parents_of(draft), drawn(draft)

    def candidate(node, last):                       # the next child to try; `size` if there is none
        open_ = live & (parents == node[:, None]) & (index > last[:, None])
        return jnp.where(open_, index, size).min(1)

    def changed(rule, where, state, argument):
        def pick(new, old):
            return jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        return lax.cond(where.any(), lambda: jax.tree.map(pick, rule(*argument), state), lambda: state)

    def body(carry):
        node, child, chances, state = carry
        trying, at = child < size, jnp.minimum(child, size - 1)
        token = draft.tokens[rows, at]
        odds = chance(state, token)
        yes = trying & (uniform[rows, at] < odds)
        chances = chances.at[rows, child].set(odds, mode="drop")
        state = changed(arrive, yes, state, (at,))
        state = changed(reject, trying & ~yes, state, (state, token))
        node = jnp.where(yes, at, node)
        return node, candidate(node, at), chances, state

    root = jnp.zeros((batch,), index.dtype)
    start = root, candidate(root, root), jnp.zeros_like(uniform), arrive(root)
    node, _, chances, state = lax.while_loop(lambda carry: (carry[1] < size).any(), body, start)
    return node.astype(jnp.int32), state, chances


def residual(p: Float[Array, "*lead V"], q: Float[Array, "*lead V"]) -> Float[Array, "*lead V"]:
    """[p - q]+, not normalised; p itself where nothing is left, for equal laws leave only rounding errors there."""
    rest = jnp.where(p > q, p - q, 0)
    return jnp.where(rest.any(-1, keepdims=True), rest, p)
