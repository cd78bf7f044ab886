"""Traversal verification: a tree is judged from its leaves to its root. B sequences, T nodes, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding import tree
from parallax.decoding.base import policy
from parallax.decoding.verify.block import keeping
from parallax.decoding.verify.judge import (
    Judge,
    Judgement,
    drawn,
    log_ratio,
    log_residual,
    normalised,
    parents_of,
    row,
    without,
)


class _State(NamedTuple):
    """turn: nodes judged so far; node [B]: the accepted one, -1 before; alpha [B, T]: log chance of the path down to a
    node; ratio [B, T]: log p / q of a node's token, by the laws of its parent; chances [B, T]. changed [B, T]: nodes
    that lost a child; p, q [B, D, V]: logs of what is left of their laws, by depth, as no two of them that are still to
    be judged are equally deep.
    """

    turn: Int[Array, ""]
    node: Int[Array, "B"]
    alpha: Float[Array, "B T"]
    ratio: Float[Array, "B T"]
    chances: Float[Array, "B T"]
    changed: Bool[Array, "B T"]
    p: Float[Array, "B D V"]
    q: Float[Array, "B D V"]


@policy
class Traversal(Judge):
    """Judge whole paths, the leftmost leaf first; a path that falls loses its leaf and is judged again.

    Every node has laws p, q of what may come behind it and a chance alpha of its path, min(1, alpha p / q) from that of
    its parent. The path down to a leaf passes with its alpha, and the next token comes from the leaf's p. Else the leaf
    is removed from its parent: with S = sum [alpha p - q]+, p becomes [alpha p - q]+ / S, alpha S / (S + 1 - alpha),
    and q, if siblings were drawn without replacement, loses the leaf's token. What is left at last is the root, whose p
    gives the token. Paths are taken depth first, siblings in the order of their indices. For a chain this is `Block`.
    Source: Weng et al. (arXiv:2505.12398).
    """

    def judge(self, draft, logp, uniform):
        size = draft.tokens.shape[1]
        rows, parents, live = jnp.arange(len(logp)), parents_of(draft), drawn(draft)
        above = jnp.broadcast_to(jnp.asarray(tree.ancestors(draft.parents, draft.depth)), (*live.shape, size))
        order = post_order(parents, above, live, draft.depth)
        level = jnp.broadcast_to(jnp.asarray(tree.depths(draft.parents, draft.depth)), live.shape)
        index = jnp.arange(size)

        def paths(alpha, ratio, below: Bool[Array, "B T"]):
            """The chances of the nodes `below` anew, level by level."""
            for _ in range(draft.depth):
                alpha = jnp.where(below, jnp.minimum(jnp.take_along_axis(alpha, parents, 1) + ratio, 0), alpha)
            return alpha

        def law(changed, kept, fresh, node):
            """The law behind a node, as far as its children have fallen."""
            return jnp.where(changed[rows, node][:, None], row(kept, level[rows, node]), row(fresh, node))

        def body(state: _State):
            leaf = order[:, state.turn]
            chance = jnp.where(leaf == 0, 1, jnp.exp(state.alpha[rows, leaf]))
            trying = state.node < 0
            passes = trying & ((uniform[rows, leaf] < chance) | (leaf == 0))
            falls = trying & ~passes
            chances = state.chances.at[rows, jnp.where(trying, leaf, size)].set(chance, mode="drop")

            node, token = parents[rows, leaf], draft.tokens[rows, leaf]
            p, q = law(state.changed, state.p, logp, node), law(state.changed, state.q, draft.logq, node)
            alpha = state.alpha[rows, node]
            rest = log_residual(alpha[:, None] + p, q)
            kept = self._keep(jnp.exp(jax.nn.logsumexp(rest, -1)), alpha, q, token)
            p, q = normalised(rest, p), q if draft.replacement else without(q, token)

            anew = jnp.take_along_axis(p, draft.tokens, 1) - jnp.take_along_axis(q, draft.tokens, 1)
            ratio = jnp.where(falls[:, None] & (parents == node[:, None]), anew, state.ratio)
            place = jnp.where(falls, node, size)
            alpha = state.alpha.at[rows, place].set(kept, mode="drop")
            below = jnp.take_along_axis(above, jnp.broadcast_to(node[:, None, None], (*live.shape, 1)), 2)[..., 0]
            alpha = paths(alpha, ratio, falls[:, None] & live & below & (index != node[:, None]))
            depth = jnp.where(falls, level[rows, node], size)
            return _State(state.turn + 1, jnp.where(passes, leaf, state.node), alpha, ratio, chances,
                          state.changed.at[rows, place].set(True, mode="drop"),
                          state.p.at[rows, depth].set(p, mode="drop"), state.q.at[rows, depth].set(q, mode="drop"))

        ratio = jnp.where(live & (index > 0), log_ratio(draft, logp), 0)
        alpha = paths(jnp.zeros_like(ratio), ratio, live & (index > 0))
        blank = jnp.zeros((len(logp), draft.depth, logp.shape[2]), logp.dtype)
        start = _State(jnp.int32(0), jnp.full((len(logp),), -1, jnp.int32), alpha, ratio, jnp.zeros_like(uniform),
                       jnp.zeros_like(live), blank, blank)
        final = lax.while_loop(lambda state: (state.node < 0).any(), body, start)
        return Judgement(final.node, jnp.exp(law(final.changed, final.p, logp, final.node)), final.chances)

    @staticmethod
    def _keep(rest: Float[Array, "B"], alpha: Float[Array, "B"], q: Float[Array, "B V"],
              token: Int[Array, "B"]) -> Float[Array, "B"]:
        """The log chance of a node's path after one of its children, with `token`, fell; rest is S."""
        return jnp.log(keeping(rest, alpha))


def post_order(parents: Int[Array, "B T"], above: Bool[Array, "B T T"], live: Bool[Array, "B T"],
               depth: int) -> Int[Array, "B T"]:
    """The live nodes in the order in which a depth-first walk leaves them, the root last; then the others."""
    size = parents.shape[1]
    index = jnp.arange(size)
    weight = (above & live[..., None]).sum(1)                          # live nodes below every node, itself included
    earlier = (parents[:, :, None] == parents[:, None]) & (index[None] < index[:, None]) & (index[None] > 0)
    before = ((earlier & live[:, None]) * weight[:, None]).sum(-1) * (index > 0)
    start = before
    for _ in range(depth):
        start = before + jnp.where(index > 0, jnp.take_along_axis(start, parents, 1), 0)
    return jnp.argsort(jnp.where(live, start + weight - 1, size)).astype(jnp.int32)
