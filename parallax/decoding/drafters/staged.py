"""A drafter that is itself a speculative decoder: a small model writes ahead, and its own drafter helps it.

B sequences, D draft length, K tokens that one step of the inner decoder can emit, V vocabulary, N token slots. Source:
staged speculative decoding (arXiv:2308.04623); with a tree drafter inside it is the hierarchy of SpecMQuant
(arXiv:2505.22179): the tree is verified by the small model into a chain, and that by the target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.decoding import spec, tree
from parallax.decoding.base import Advance, Context, DecodeState, Draft, Drafter, Kind, policy, static
from parallax.decoding.sampling import DRAFT, Greedy, Sampler, private_keys
from parallax.decoding.verify import Follow
from parallax.models.cache import Block, Cache, commit, truncate
from parallax.models.transformer import Model


class Inner(NamedTuple):
    """What the inner decoder keeps between two drafts: its cache, and its drafter's own state. Its text is ours.

    drafted [B, D + 1], at [B]: the tokens of the last draft, and the place of the first of them, if that draft was not
    compared with the text yet.
    """

    cache: Cache
    own: Any
    drafted: Int[Array, "B DP"]
    at: Int[Array, "B"]


_NONE = np.iinfo(np.int32).max // 2


@policy
class Staged(Drafter):
    """A chain of `draft_length` tokens that the draft model writes, faster than one token per forward.

    The chain is the very one that `DraftModel` drafts (of a sampled one: its law), for the inner decoder is exact.

    Attributes:
      model: the draft model; params["draft"] are its weights, or {"target": its weights, "draft": those of the inner
        drafter} if that needs some too.
      sampler: how coupled and sampled drafts are drawn, best as the target's tokens are.
      inner: the draft model's own drafter, as text or object: a method without a draft model and its options.
        `autoregressive` makes this `DraftModel`.
      draft_length: tokens per draft.
      kind: as for `DraftModel`.
    """

    model: Model = static()
    sampler: Sampler = Greedy()
    inner: Drafter = "prompt_lookup(draft_length=3)"
    draft_length: int = static(default=4)
    kind: Kind = static(default="deterministic")

    def __post_init__(self):
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be at least 1, got {self.draft_length}")
        if self.kind not in ("deterministic", "coupled", "sampled"):
            raise ValueError(f"kind must be 'deterministic', 'coupled' or 'sampled', got {self.kind!r}")
        # What a sampled draft is drawn with is the draft model's own noise, which its drafter then may share.
        inside = "deterministic" if self.kind == "deterministic" else "coupled"
        object.__setattr__(self, "inner", build(self.inner, sampler=self.sampler, kind=inside))

    @property
    def depth(self) -> int:
        return self.draft_length

    def decoder(self, drafter: Drafter):
        """The draft model with `drafter` in front of it."""
        from parallax.decoding.speculative import Speculative  # late: that module needs the package of this one

        greedy = self.kind == "deterministic" and not isinstance(self.sampler, Greedy)
        sampler = Greedy() if greedy else self.sampler
        return Speculative(model=self.model, drafter=drafter, verifier=Follow(sampler=sampler))

    def check(self, target):
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(f"the draft model must have the target's vocabulary: expected {theirs} tokens, got "
                             f"{ours}; use a draft with the target's tokenizer")
        if self.kind == "sampled" and isinstance(self.sampler, Greedy):
            raise ValueError("a sampled draft needs a sampler with a temperature, got Greedy: use kind='deterministic'")
        self.decoder(self.inner).check()

    def init(self, params, ctx, prompt, prompt_length):
        if params is None:
            raise ValueError("params has no 'draft': expected the draft model's parameters beside those of 'target'")
        # Room beyond that of the target for what is drafted, and for the last commit of the inner decoder.
        room = ctx.cache.capacity + self.draft_length + self.inner.depth + 1
        cache = self.model.new_cache(prompt.shape[0], room)
        params = _nested(params)
        inside = self._context(params, ctx, jnp.zeros_like(ctx.length), cache)
        return Inner(cache, self.inner.init(params.get("draft"), inside, prompt, prompt_length),
                     jnp.zeros((prompt.shape[0], self.draft_length + 1), jnp.int32), jnp.full_like(ctx.length, _NONE))

    def propose(self, params, own, ctx):
        params, size = _nested(params), self.draft_length
        own, forwards, rows = self._read(params, own, ctx, ctx.length - 1, size + 2)
        limit = ctx.length + size
        certain = self.model.config.positions != "learned"
        if not certain:                                      # the token behind the last position is the last to draw
            limit = jnp.clip(self.model.config.max_positions + 1, ctx.length, limit)
        keys, drafter = ctx.key, self.inner
        if self.kind == "sampled":
            keys = private_keys(ctx.key, ctx.length, ctx.length, DRAFT)
            law = jnp.zeros((*ctx.length.shape, size, self.model.config.vocab_size))
            drafter = _Recorded(drafter=drafter, sampler=self.sampler)
            own = own._replace(own=(own.own, law, ctx.length))
        decoder = self.decoder(drafter)
        tokens = jnp.pad(ctx.tokens, ((0, 0), (0, size)))
        state = DecodeState(tokens, ctx.length, limit, ctx.length >= limit, keys, own.cache, own.own)

        def body(carry):
            state, forwards, rows = carry
            state, info = decoder.step(params, state)
            # Not the rows that ran, which depend on the other sequences: those that were this one's own.
            return state, forwards + info.target_forwards, rows + info.target_forwards + info.proposed

        state, forwards, rows = lax.while_loop(lambda carry: ~carry[0].done.all(), body,
                                               (state, forwards, rows))
        inner, logq = (state.own[0], state.own[1]) if self.kind == "sampled" else (state.own, None)
        places = ctx.length[:, None] - 1 + jnp.arange(size + 1)
        draft = Draft(jnp.take_along_axis(state.tokens, places, 1), tree.Shape.chain(size).parents,
                      places < state.length[:, None], depth=size, kind=self.kind, logq=logq, certain=certain,
                      forwards=forwards, rows=rows)
        return draft, Inner(state.cache, inner, draft.tokens, ctx.length - 1)

    def observe(self, params, own, advance, step, ctx):
        if step is not None:
            return self.rewind(params, own, ctx)
        until = jnp.where(advance.count > 0, advance.start + advance.count, own.cache.length)
        return self._read(_nested(params), own, ctx, until, advance.tokens.shape[1])[0]

    def rewind(self, params, own, ctx):
        """Keeps what the text, which may have taken another way than the draft, has in common with it.

        The last token of a draft never went through the draft model, and is missing after a draft that was accepted as
        a whole. The inner drafter may lack one more, by the same rule: both go back to where neither lacks any.
        """
        params = _nested(params)
        places = own.at[:, None] + jnp.arange(self.draft_length + 1)
        text = jnp.take_along_axis(ctx.tokens, jnp.clip(places, 0, ctx.tokens.shape[1] - 1), 1)
        same = (text == own.drafted) & (places < ctx.length[:, None])
        common = jnp.where(own.at == _NONE, _NONE, own.at + lax.cumprod(same.astype(jnp.int32), axis=1).sum(1))
        length = jnp.minimum(jnp.minimum(own.cache.length, common), ctx.length - 1)
        length = jnp.where(length < ctx.length - 1, jnp.maximum(length - 1, 0), length)
        cache = truncate(own.cache, length)
        inside = self._context(params, ctx, length + 1, cache)
        return Inner(cache, self.inner.rewind(params.get("draft"), own.own, inside), own.drafted,
                     jnp.full_like(own.at, _NONE))

    def _read(self, params, own, ctx, until, size: int):
        """(own with the text in front of `until` committed, forwards [B] and rows [B] that it took); `size` at a time.
        """
        rows = jnp.broadcast_to(jnp.arange(size), (until.shape[0], size))

        def body(carry):
            own, forwards, read = carry
            start = own.cache.length
            count = jnp.clip(until - start, 0, size)
            places = start[:, None] + jnp.arange(size + 1)
            tokens = jnp.take_along_axis(ctx.tokens, jnp.clip(places, 0, ctx.tokens.shape[1] - 1), 1)
            block = Block(tokens[:, :-1], places[:, :-1], jnp.tril(jnp.ones((size, size), bool)))
            out = self.model.forward(params["target"], block, own.cache)
            cache = commit(own.cache, out.kv, rows, count, self.model.config.kernels)
            advance = Advance(tokens[:, 1:], count, start, out.hidden, out.taps)
            inside = self._context(params, ctx, cache.length + 1, cache)
            own = own._replace(cache=cache, own=self.inner.observe(params.get("draft"), own.own, advance, None, inside))
            return own, forwards + (count > 0), read + count

        zero = jnp.zeros_like(until)
        return lax.while_loop(lambda carry: (carry[0].cache.length < until).any(), body, (own, zero, zero))

    def _context(self, params, ctx, length, cache) -> Context:
        return Context(self.model, params["target"], ctx.tokens, length, cache, ctx.key)


@policy
class _Recorded(Drafter):
    """`drafter`, and the law of every token that its decoder emitted: own = (its own, [B, D, V], text length [B])."""

    drafter: Drafter
    sampler: Sampler

    @property
    def depth(self) -> int:
        return self.drafter.depth

    @property
    def kind(self) -> Kind:
        return self.drafter.kind

    def propose(self, params, own, ctx):
        draft, inner = self.drafter.propose(params, own[0], ctx)
        return draft, (inner, *own[1:])

    def observe(self, params, own, advance, step, ctx):
        inner, law, origin = own
        inner = self.drafter.observe(params, inner, advance, step, ctx)
        seen = tree.seen(step.draft, ctx._replace(length=advance.start + 1))
        emitted = jnp.take_along_axis(jax.nn.log_softmax(self.sampler.warp(step.logits, seen), -1),
                                      step.verdict.path[..., None], 1)                              # [B, K, V]
        return inner, _write(law, emitted, advance.start + 1 - origin, advance.count), origin


def _write(law: Float[Array, "B D V"], rows: Float[Array, "B K V"], start: Int[Array, "B"],
           count: Int[Array, "B"]) -> Float[Array, "B D V"]:
    """`law` with rows[b, :count[b]] from start[b] on."""
    offset = jnp.arange(law.shape[1]) - start[:, None]
    chosen = jnp.take_along_axis(rows, jnp.clip(offset, 0, rows.shape[1] - 1)[..., None], 1)
    return jnp.where(((offset >= 0) & (offset < count[:, None]))[..., None], chosen, law)


def build(inner: Any, **parts) -> Drafter:
    """The drafter that a text names, of the methods that need no draft model; an object is taken as it is.

    Raises:
      ValueError: an unknown name or option, or a value that the drafter refuses.
    """
    return spec.build(inner, spec.drafters(), "inner drafter", **parts)


def _nested(params: Any) -> Any:
    """Parameters of the inner decoder: those of the draft model alone, or with those of its drafter."""
    return params if "target" in params else {"target": params}
