"""A model that fills masks drafts a whole chain in one forward.

B sequences, D draft length, K = D + 1 text rows, W window, V vocabulary, N token slots. Source: SpecDiff
(arXiv:2408.05636), with one denoising step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from parallax.decoding.base import Draft, Drafter, Kind, policy, static
from parallax.decoding.sampling import DRAFT, Greedy, Sampler, Seen, argmax, noise_private
from parallax.decoding.tree import Shape
from parallax.models.cache import Block, commit, truncate
from parallax.models.transformer import Model


@policy
class MaskFill(Drafter):
    """Puts masks behind the text and reads off, in one forward, what belongs at each of them.

    The tokens of a draft do not know of each other: each is taken from, or drawn by, the law at its own mask, given the
    text alone. These are the laws that a sampled draft records, so the rules for sampled chains verify it.

    A causal model keeps a cache of the text, and each mask sees the masks in front of it. In a model that was trained
    to see both ways nothing of the text may be cached, for its rows see what is written later: such a one runs over
    the last `window` tokens and the masks, all of which see each other, and knows nothing of the text before.

    Attributes:
      model: of either alignment: the row of a mask predicts what belongs there (`same`) or what comes behind it
        (`shifted`, where the pending token predicts the first draft token and one mask fewer is needed).
      sampler: how coupled and sampled drafts are drawn, best as the target's tokens are.
      draft_length: tokens per draft.
      mask_token: what stands at a mask; never drafted itself. A negative one counts from the end of the vocabulary,
        where masked diffusion models usually have it.
      window: tokens of the text that a model sees that is not causal.
      kind: `deterministic` takes the most likely tokens, `coupled` draws them with the target's own noise, `sampled`
        with noise of their own.
    """

    model: Model = static()
    sampler: Sampler = Greedy()
    draft_length: int = static(default=4)
    mask_token: int = static(default=-1)
    window: int = static(default=128)
    kind: Kind = static(default="deterministic")

    def __post_init__(self):
        for name in ("draft_length", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kind not in ("deterministic", "coupled", "sampled"):
            raise ValueError(f"kind must be 'deterministic', 'coupled' or 'sampled', got {self.kind!r}")

    @property
    def depth(self) -> int:
        return self.draft_length

    @property
    def masks(self) -> int:
        """Rows that are masks."""
        return self.draft_length - (self.model.config.alignment == "shifted")

    def check(self, target):
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(f"the draft model must have the target's vocabulary: expected {theirs} tokens, got "
                             f"{ours}; use a draft with the target's tokenizer")
        if not -ours <= self.mask_token < ours:
            raise ValueError(f"mask_token must be a token of the draft model, below {ours}, got {self.mask_token}")
        if self.kind == "sampled" and isinstance(self.sampler, Greedy):
            raise ValueError("a sampled draft needs a sampler with a temperature, got Greedy: use kind='deterministic'")

    def init(self, params, ctx, prompt, prompt_length):
        if params is None:
            raise ValueError("params has no 'draft': expected the draft model's parameters beside those of 'target'")
        return self.model.new_cache(prompt.shape[0], ctx.cache.capacity if self._causal else 0)

    def propose(self, params, own, ctx):
        size, batch = self.draft_length, ctx.length.shape[0]
        text = size + 1 if self._causal else self.window
        # Missing in the cache: what the last step emitted. Without a cache: all that fits into the window.
        missing = jnp.minimum(ctx.length, text) if not self._causal else jnp.clip(ctx.length - own.length, 0, text)
        offset = jnp.arange(text)
        places = jnp.concatenate([(ctx.length - missing)[:, None] + offset,
                                  ctx.length[:, None] + jnp.arange(self.masks)], 1)
        tokens = jnp.take_along_axis(ctx.tokens, jnp.minimum(places[:, :text], ctx.tokens.shape[1] - 1), 1)
        mask = self.mask_token % self.model.config.vocab_size
        tokens = jnp.concatenate([tokens, jnp.full((batch, self.masks), mask, jnp.int32)], 1)
        there = jnp.concatenate([offset < missing[:, None], jnp.ones((batch, self.masks), bool)], 1)
        rows = text + self.masks
        sees = jnp.tril(jnp.ones((rows, rows), bool)) if self._causal else jnp.ones((rows, rows), bool)
        out = self.model.forward(params, Block(tokens, places, sees & there[:, None] | jnp.eye(rows, dtype=bool)), own)
        if self._causal:
            own = commit(own, out.kv, jnp.broadcast_to(offset, (batch, text)), missing, self.model.config.kernels)
        hidden = out.hidden[:, text:]
        if self.masks < size:
            last = jnp.maximum(missing - 1, 0)[:, None, None]
            hidden = jnp.concatenate([jnp.take_along_axis(out.hidden, last, 1), hidden], 1)
        logits = self.model.unembed(params, hidden).at[..., mask].set(-jnp.inf)
        drafted, logq = self._draw(logits, ctx)
        pending = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)
        node = jnp.arange(size + 1)
        certain = self.model.config.positions != "learned"
        # The row that a node was read from, and learned positions have an end.
        read = ctx.length[:, None] - 1 + node - (self.masks < size)
        valid = (node == 0) | (read < self.model.config.max_positions) | certain
        draft = Draft(jnp.concatenate([pending, drafted], 1), Shape.chain(size).parents, valid, depth=size,
                      kind=self.kind, logq=logq, certain=certain, forwards=1, rows=missing + self.masks)
        return draft, own

    def observe(self, params, own, advance, step, ctx):
        size = advance.tokens.shape[1]
        if not self._causal or step is not None and size <= self.draft_length + 1:
            return own                # masks leave nothing in the cache; the text of a draft of its own length waits
        rows = jnp.broadcast_to(jnp.arange(size), advance.tokens.shape)
        places = own.length[:, None] + rows
        tokens = jnp.take_along_axis(ctx.tokens, jnp.minimum(places, ctx.tokens.shape[1] - 1), 1)
        out = self.model.forward(params, Block(tokens, places, jnp.tril(jnp.ones((size, size), bool))), own)
        return commit(own, out.kv, rows, jnp.maximum(ctx.length - 1 - own.length, 0), self.model.config.kernels)

    def rewind(self, params, own, ctx):
        return truncate(own, ctx.length - 1) if self._causal else own

    @property
    def _causal(self) -> bool:
        return self.model.config.visibility == "causal"

    def _draw(self, logits, ctx):
        """(the draft [B, D], the laws it was drawn from [B, D, V] if it is sampled)."""
        size = self.draft_length
        nothing = jnp.zeros((logits.shape[0], size, 0), jnp.int32)
        seen = Seen(ctx.tokens, ctx.length, nothing, nothing.astype(bool))       # no mask knows what filled the others
        if self.kind != "sampled":
            greedy = self.kind == "deterministic" and not isinstance(self.sampler, Greedy)
            sampler = Greedy() if greedy else self.sampler
            return sampler.draw(logits, ctx.key, ctx.length, jnp.arange(size), size - 1, seen), None
        warped = self.sampler.warp(logits, seen)
        noise = jnp.stack([noise_private(ctx.key, ctx.length, ctx.length + i, DRAFT, logits.shape[-1])
                           for i in range(size)], 1)
        return argmax(warped + noise), jax.nn.log_softmax(warped, -1)
