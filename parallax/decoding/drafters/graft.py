"""Prune a drafted tree and graft on what the text has to say: as many nodes, so verification costs the same.

B sequences, T tree nodes, R branches of G tokens, J tokens of a match, N token slots. Source: Graft (prune-then-graft);
the order in which nodes are served is ours.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from parallax.decoding.base import Context, Draft, Drafter, policy, static
from parallax.decoding.drafters.draft_model import DraftModel
from parallax.decoding.growth import TreePolicy
from parallax.decoding.merge import graft, merge, prune
from parallax.decoding.tree import depths
from parallax.models.transformer import Model


@policy
class Graft(Drafter):
    """The tree of a draft model, whose least likely nodes give way to branches copied from earlier text.

    The best nodes of the tree stay. Wherever the text down to one of them, its own path included, stood in the text
    before and went on there in a way that the tree lacks, that continuation may be grafted on: under the nodes with the
    longest match first, of equals under the first in the tree. Places that are left keep the tree's own nodes, so
    without a match the draft is the tree.

    Attributes:
      model: the draft model; params["draft"] are its weights.
      tree: how its tree grows, as for `DraftModel`; its nodes are the nodes of the draft.
      branches, branch_length: how many continuations, and of how many tokens, take the place of the tree's last nodes.
      max_ngram, min_ngram: longest match that is looked for, and shortest that counts.
    """

    model: Model = static()
    tree: TreePolicy = "beam(width=4, depth=4, nodes=15)"
    branches: int = static(default=2)
    branch_length: int = static(default=4)
    max_ngram: int = static(default=6)
    min_ngram: int = static(default=2)

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"expected 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        for name in ("branches", "branch_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        object.__setattr__(self, "tree", self.grower.tree)
        if not isinstance(self.tree, TreePolicy):                # a placeholder, while jax handles the structure
            return
        if self.branches * self.branch_length >= self.tree.nodes:
            raise ValueError(f"{self.branches} branches of {self.branch_length} tokens leave nothing of a tree of "
                             f"{self.tree.nodes} nodes: expected fewer")

    @property
    def grower(self) -> DraftModel:
        """The drafter of the tree."""
        return DraftModel(model=self.model, tree=self.tree)

    @property
    def depth(self) -> int:
        return self.tree.depth + self.branch_length

    def check(self, target):
        self.grower.check(target)

    def init(self, params, ctx, prompt, prompt_length):
        return self.grower.init(params, ctx, prompt, prompt_length)

    def propose(self, params, own, ctx):
        draft, own = self.grower.propose(params, own, ctx)
        return self.grafted(draft, ctx), own

    def observe(self, params, own, advance, step, ctx):
        return self.grower.observe(params, own, advance, step, ctx)

    def rewind(self, params, own, ctx):
        return self.grower.rewind(params, own, ctx)

    def grafted(self, draft: Draft, ctx: Context) -> Draft:
        """`draft` with branches from the text in the place of its last nodes."""
        size, (count, length) = draft.tokens.shape[1], (self.branches, self.branch_length)
        level = jnp.broadcast_to(jnp.asarray(depths(draft.parents, draft.depth)), draft.tokens.shape)
        scores = -level if draft.scores is None else draft.scores
        pruned, _ = prune(draft, scores, size - 1 - count * length)
        match, tokens, there = self.continuations(pruned, ctx)
        known = pruned.valid[:, None] & (pruned.parents[:, None] == jnp.arange(match.shape[1])[:, None]) & (
            pruned.tokens[:, None] == tokens[:, :, :1]) & (jnp.arange(match.shape[1]) > 0)
        match = jnp.where(known.any(2), 0, match)                   # the child that has it matches one token more
        best, onto = lax.top_k(match, min(count, match.shape[1]))
        chosen = jnp.take_along_axis(tokens, onto[..., None], 1)
        there = jnp.take_along_axis(there, onto[..., None], 1) & (best > 0)[..., None]
        grown = graft(pruned, onto, chosen, there)
        united = merge(grown, draft)
        # Those in front are as many as the draft has, at most; its own last nodes fill up, best first.
        order = jnp.argsort(jnp.argsort(-scores[:, 1:], 1), 1)
        kept = jnp.concatenate([jnp.full(grown.tokens.shape, jnp.inf), -order.astype(jnp.float32)], 1)
        result, _ = prune(united, kept, size - 1)
        return result.replace(forwards=draft.forwards, rows=draft.rows)

    def continuations(self, draft: Draft, ctx: Context) -> tuple[Int[Array, "B T"], Int[Array, "B T G"],
                                                                 Bool[Array, "B T G"]]:
        """(longest earlier match of the text down to every node, 0 if too short; the tokens behind it; which are there)

        Of equally long matches the last counts, and none of the text's own end, which has nothing behind it.
        """
        (batch, size), slots = draft.tokens.shape, ctx.tokens.shape[1]
        index = jnp.arange(slots)
        parents = jnp.broadcast_to(jnp.asarray(draft.parents), (batch, size))
        node = jnp.broadcast_to(jnp.arange(size), (batch, size))
        place = jnp.broadcast_to(ctx.length[:, None] - 1, (batch, size))             # of the text, once past the root
        running = jnp.broadcast_to(index < ctx.length[:, None, None] - 1, (batch, size, slots))
        matched = jnp.zeros((batch, size, slots), jnp.int32)
        for back in range(self.max_ngram):
            drafted = jnp.take_along_axis(draft.tokens, node, 1)
            decided = jnp.take_along_axis(ctx.tokens, jnp.maximum(place, 0), 1)
            wanted = jnp.where(node > 0, drafted, decided)
            here = jnp.roll(ctx.tokens, back, 1)                                     # here[i] = tokens[i - back]
            running &= (here[:, None] == wanted[..., None]) & (index >= back)
            matched += running
            place = jnp.where(node > 0, place, place - 1)
            node = jnp.take_along_axis(parents, node, 1)
        matched = jnp.where(draft.valid[..., None] & (matched >= self.min_ngram), matched, 0)
        end = jnp.argmax(matched * slots + index, 2)                                                    # [B, T]
        source = end[..., None] + 1 + jnp.arange(self.branch_length)
        tokens = jnp.take_along_axis(ctx.tokens[:, None], jnp.minimum(source, slots - 1), 2)
        match = jnp.take_along_axis(matched, end[..., None], 2)[..., 0]
        return match, tokens, (source < ctx.length[:, None, None]) & (match > 0)[..., None]
