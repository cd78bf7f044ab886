"""A smaller language model writes ahead: chains and trees of any policy.

B sequences, D draft depth, A tokens that the draft model may lack, N token slots. Source: speculative decoding
(Leviathan et al., arXiv:2211.17192) and speculative sampling (Chen et al., arXiv:2302.01318).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from parallax.decoding.base import policy, static
from parallax.decoding.drafters.growing import Growing
from parallax.decoding.grow import Grown, Source, accepted_columns, grow
from parallax.models.cache import Block, Cache, commit, truncate
from parallax.models.transformer import Model

# The last token of a draft never goes through the draft model: it is missing if the whole draft was accepted.
_BEHIND = 2


class Own(NamedTuple):
    """Between two drafts: the draft model's cache, the controller's state."""

    cache: Cache
    control: Any


class Drafted(NamedTuple):
    """Between a draft and its verification."""

    cache: Cache
    control: Any
    grown: Grown


@policy
class DraftModel(Growing):
    """Drafts by a causal model over the target's vocabulary; params["draft"] are its weights.

    Keeps a cache of its own, which holds the tokens in front of the pending one, or all but the last of these. It is
    written once per step, behind the verification: with the keys and values that the draft was grown with, as far as
    the text took its path.

    Attributes:
      model: the draft model. The others are those of `Growing`.
    """

    model: Model = static()

    def check(self, target):
        ours, theirs = self.model.config, target.config
        if ours.vocab_size != theirs.vocab_size:
            raise ValueError(f"the draft model must have the target's vocabulary: expected {theirs.vocab_size} tokens, "
                             f"got {ours.vocab_size}; use a draft with the target's tokenizer")
        if ours.alignment != "shifted" or ours.visibility != "causal":
            raise ValueError("the draft model must write left to right (alignment 'shifted', visibility 'causal'), got "
                             f"{ours.alignment!r} and {ours.visibility!r}")
        super().check(target)

    def init(self, params, ctx, prompt, prompt_length):
        if params is None:
            raise ValueError("params has no 'draft': expected the draft model's parameters beside those of 'target'")
        batch = prompt.shape[0]
        return Own(self.model.new_cache(batch, ctx.cache.capacity), self.controller.init(batch, self.depth))

    def propose(self, params, own, ctx):
        positions = own.cache.length[:, None] + jnp.arange(_BEHIND)
        config = self.model.config
        source = Source(
            lambda block, context, _: self.model.forward(params, block, own.cache, context=context),
            lambda hidden: self.model.unembed(params, hidden), _text(ctx.tokens, positions), positions,
            ctx.length - own.cache.length, config.max_positions if config.positions == "learned" else None)
        grown = grow(source, self.tree, self.controller, own.control, ctx, sampler=self.sampler, kind=self.kind)
        return grown.draft, Drafted(*own, grown)

    def observe(self, params, own, advance, step, ctx):
        if step is None:
            positions = advance.start[:, None] + jnp.arange(advance.tokens.shape[1])
            return own._replace(cache=self._read(params, own.cache, ctx, positions, advance.count))
        grown = own.grown
        columns, count = accepted_columns(grown, self.tree, advance.tokens, advance.count)
        cache = commit(own.cache, grown.kv, columns, count, self.model.config.kernels)
        accepted = jnp.minimum(step.verdict.count - 1, grown.levels)
        own = Own(cache, self.controller.update(own.control, grown.levels, accepted, self.depth))
        # The very draft that it made can leave no more than one token out: then no other forward is compiled.
        return own if step.draft.tokens is grown.draft.tokens else self.rewind(params, own, ctx)

    def rewind(self, params, own, ctx):
        """Also reads what it lacks of the text, if that is more than a draft begins with."""
        def missing(cache):
            return jnp.maximum(ctx.length - cache.length - _BEHIND, 0)

        def read(cache):
            positions = cache.length[:, None] + jnp.arange(_BEHIND)
            return self._read(params, cache, ctx, positions, jnp.minimum(missing(cache), _BEHIND))

        return own._replace(cache=lax.while_loop(lambda cache: missing(cache).any(), read,
                                                 truncate(own.cache, ctx.length - 1)))

    def _read(self, params, cache, ctx, positions, count):
        """Commits the first `count` of the decided tokens at `positions`, which follow those of the cache."""
        size = positions.shape[1]
        block = Block(_text(ctx.tokens, positions), positions, jnp.tril(jnp.ones((size, size), bool)))
        out = self.model.forward(params, block, cache)
        rows = jnp.broadcast_to(jnp.arange(size), positions.shape)
        return commit(cache, out.kv, rows, count, self.model.config.kernels)


def _text(tokens, positions):
    """The tokens at `positions`, which may lie behind the buffer."""
    return jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), 1)
