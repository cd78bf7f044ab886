"""A smaller language model writes ahead, one token at a time.

B sequences, D draft length, V vocabulary, N token slots. Source: speculative decoding (Leviathan et al.,
arXiv:2211.17192) and speculative sampling (Chen et al., arXiv:2302.01318).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from parallax.decoding.base import Draft, Drafter, Kind, policy, static
from parallax.decoding.sampling import DRAFT, Greedy, Sampler, Seen, argmax, noise_private
from parallax.decoding.tree import Shape
from parallax.models.cache import Block, commit, truncate
from parallax.models.transformer import Model


@policy
class DraftModel(Drafter):
    """A chain of `draft_length` tokens by a causal model over the target's vocabulary; params["draft"] are its weights.

    Attributes:
      model: the draft model.
      sampler: how coupled and sampled drafts are drawn, best as the target's tokens are.
      draft_length: tokens per draft. The card of the method says 3 to 8: more for a draft that is often right.
      kind: `deterministic` takes the most likely tokens. `coupled` draws them with the target's own noise, so that
        `verify.Follow` accepts where the two models agree and still emits the tokens of seeded plain decoding.
        `sampled` draws them with noise of their own and records their law, for `verify.Rejection`.

    Keeps a cache of its own, which holds the tokens in front of the pending one, or all but the last of these: the
    last token of a draft never went through the draft model, and is missing after a draft that was accepted as a whole.
    Drafting commits ahead; what was not accepted is cut off by `truncate` after verification.
    """

    model: Model = static()
    sampler: Sampler = Greedy()
    draft_length: int = static(default=4)
    kind: Kind = static(default="deterministic")

    def __post_init__(self):
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be at least 1, got {self.draft_length}")
        if self.kind not in ("deterministic", "coupled", "sampled"):
            raise ValueError(f"kind must be 'deterministic', 'coupled' or 'sampled', got {self.kind!r}")

    @property
    def depth(self) -> int:
        return self.draft_length

    def check(self, target):
        ours, theirs = self.model.config, target.config
        if ours.vocab_size != theirs.vocab_size:
            raise ValueError(f"the draft model must have the target's vocabulary: expected {theirs.vocab_size} tokens, "
                             f"got {ours.vocab_size}; use a draft with the target's tokenizer")
        if ours.alignment != "shifted" or ours.visibility != "causal":
            raise ValueError("the draft model must write left to right (alignment 'shifted', visibility 'causal'), got "
                             f"{ours.alignment!r} and {ours.visibility!r}")
        if self.kind == "sampled" and isinstance(self.sampler, Greedy):
            raise ValueError("a sampled draft needs a sampler with a temperature, got Greedy: use kind='deterministic'")

    def init(self, params, ctx, prompt, prompt_length):
        if params is None:
            raise ValueError("params has no 'draft': expected the draft model's parameters beside those of 'target'")
        return self.model.new_cache(prompt.shape[0], ctx.cache.capacity)

    def propose(self, params, own, ctx):
        batch = ctx.length.shape[0]
        missing = ctx.length - own.length                     # 1: the pending token, 2: also the one in front of it
        rows = jnp.broadcast_to(jnp.arange(2), (batch, 2))
        out = self._forward(params, ctx.tokens, own, own.length[:, None] + rows)
        own = commit(own, out.kv, rows, missing)
        hidden = jnp.take_along_axis(out.hidden, (missing - 1)[:, None, None], 1)[:, 0]
        token, logq = self._draw(self.model.unembed(params, hidden), ctx, 0)

        def ahead(carry, i):
            own, token = carry
            block = Block(token[:, None], own.length[:, None], jnp.ones((1, 1), bool))
            out = self.model.forward(params, block, own)
            own = commit(own, out.kv, jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32))
            drawn = self._draw(self.model.unembed(params, out.hidden[:, 0]), ctx, i)
            return (own, drawn[0]), drawn

        (own, _), rest = lax.scan(ahead, (own, token), jnp.arange(1, self.draft_length))
        drafted, logq = jax.tree.map(lambda first, later: jnp.concatenate([first[:, None], later.swapaxes(0, 1)], 1),
                                     (token, logq), rest)
        pending = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)
        offset = jnp.arange(self.draft_length + 1)
        certain = self.model.config.positions != "learned"
        # A node was drawn one position in front of it, and learned positions have an end.
        valid = (offset == 0) | (ctx.length[:, None] - 2 + offset < self.model.config.max_positions) | certain
        draft = Draft(jnp.concatenate([pending, drafted], 1), Shape.chain(self.draft_length).parents, valid,
                      depth=self.draft_length, kind=self.kind, logq=logq, certain=certain, forwards=self.draft_length,
                      rows=self.draft_length + 1)
        return draft, own

    def observe(self, params, own, advance, step, ctx):
        if step is not None:
            return truncate(own, ctx.length - 1)
        rows = jnp.broadcast_to(jnp.arange(advance.tokens.shape[1]), advance.tokens.shape)
        out = self._forward(params, ctx.tokens, own, advance.start[:, None] + rows)
        return commit(own, out.kv, rows, advance.count)

    def _forward(self, params, tokens, own, positions):
        """Runs the tokens at `positions`, each of which sees the ones in front of it."""
        size = positions.shape[1]
        chosen = jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), 1)
        return self.model.forward(params, Block(chosen, positions, jnp.tril(jnp.ones((size, size), bool))), own)

    def _draw(self, logits, ctx, i):
        """(token i of the draft [B], its law as log-probabilities [B, V] if the draft is sampled)."""
        position = ctx.length + i
        if self.kind == "deterministic":
            return argmax(logits), None
        if self.kind == "coupled":
            return self.sampler.draw(logits[:, None], ctx.key, position, jnp.zeros(1, jnp.int32), 0,
                                     Seen.text(ctx.tokens, position))[:, 0], None
        warped = self.sampler.warp(logits[:, None], Seen.text(ctx.tokens, position))[:, 0]
        noise = noise_private(ctx.key, ctx.length, position, DRAFT, logits.shape[-1])
        return argmax(warped + noise), jax.nn.log_softmax(warped, -1)
