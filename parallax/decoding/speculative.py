"""Speculative decoding over chains and trees; plain decoding is the same with an empty draft.

B sequences, N token slots, T tree nodes, D draft depth, K = D + 1, P prompt slots, C prefill chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from parallax.decoding import tree
from parallax.decoding.base import (
    Advance,
    Context,
    DecodeState,
    Drafter,
    Guarantee,
    Params,
    Step,
    StepInfo,
    Verifier,
    policy,
    static,
)
from parallax.decoding.drafters import Nothing
from parallax.decoding.growth.base import small_enough
from parallax.decoding.verify import Follow
from parallax.models.cache import KV, Block, Output, commit
from parallax.models.transformer import Model


@policy
class Speculative:
    """Draft, verify in one target forward, commit what was accepted.

    Attributes:
      model: the target.
      drafter: proposes; `Nothing` makes this plain autoregressive decoding.
      verifier: accepts.
      eos: tokens that end a sequence; the token itself is emitted.
      chunk: prompt tokens per prefill forward, at most.
    """

    model: Model = static()
    drafter: Drafter = Nothing()
    verifier: Verifier = Follow()
    eos: tuple[int, ...] = ()
    chunk: int = static(default=128)

    @property
    def guarantee(self) -> Guarantee:
        return self.verifier.guarantee

    @property
    def depth(self) -> int:
        return self.drafter.depth

    def check(self) -> None:
        """Raises ValueError for a model that left-to-right decoding cannot drive, or parts that do not fit together."""
        config = self.model.config
        if config.alignment != "shifted" or config.visibility != "causal":
            raise ValueError("speculative decoding needs a causal model whose row i predicts token i + 1 (alignment "
                             f"'shifted', visibility 'causal'); this one has {config.alignment!r} and "
                             f"{config.visibility!r}")
        small_enough(self.drafter.depth, f"a draft of {self.drafter.depth} tokens")
        self.drafter.check(self.model)
        self.verifier.check(self.drafter)

    def init(self, params: Params, prompt, prompt_length, keys, limit, capacity: int) -> DecodeState:
        batch, width = prompt.shape
        chunk = min(self.chunk, width)
        # A commit writes whole rows of K or of a chunk, the last of them behind the final length: leave room for them.
        cache = self.model.new_cache(batch, capacity + max(self.drafter.depth + 1, chunk))
        inside = jnp.arange(width) < prompt_length[:, None]
        tokens = jnp.zeros((batch, capacity), jnp.int32)
        tokens = lax.dynamic_update_slice(tokens, jnp.where(inside, prompt, 0), (0, 0))
        ctx = self._context(params, tokens, jnp.zeros_like(prompt_length), cache, keys)
        own = self.drafter.init(params.get("draft"), ctx, prompt, prompt_length)
        cache, own = self._prefill(params, tokens, prompt_length, cache, own, keys, chunk)
        return DecodeState(tokens, prompt_length, limit, prompt_length >= limit, keys, cache, own)

    def _prefill(self, params, tokens, prompt_length, cache, own, keys, chunk: int):
        """Commits all but the last prompt token, chunk by chunk, as far as the longest prompt reaches."""
        batch = tokens.shape[0]
        rows = jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))
        causal = jnp.tril(jnp.ones((chunk, chunk), bool))
        padded = jnp.pad(tokens, ((0, 0), (0, chunk + 1)))

        def body(carry):
            start, cache, own = carry
            positions = start + rows
            out = self.model.forward(params["target"], Block(lax.dynamic_slice_in_dim(padded, start, chunk, 1),
                                                             positions, causal), cache)
            count = jnp.clip(prompt_length - 1 - start, 0, chunk)
            cache = commit(cache, out.kv, rows, count, self.model.config.kernels)
            advance = Advance(lax.dynamic_slice_in_dim(padded, start + 1, chunk, 1), count,
                              jnp.full((batch,), start, jnp.int32), out.hidden, out.taps)
            ctx = self._context(params, tokens, cache.length + 1, cache, keys)
            return start + chunk, cache, self.drafter.observe(params.get("draft"), own, advance, None, ctx)

        _, cache, own = lax.while_loop(lambda carry: carry[0] < prompt_length.max() - 1, body,
                                       (jnp.int32(0), cache, own))
        return cache, own

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        ctx = self._context(params, state.tokens, state.length, state.cache, state.key)
        draft, own = self.drafter.propose(params.get("draft"), state.own, ctx)
        self.verifier.check(draft)
        block = tree.block(draft, state.length)
        out, logits, rows = self._forward(params["target"], draft, block, state)
        verdict = self.verifier(draft, logits, out.hidden, ctx)
        emitted = self._emitted(draft, verdict)                                                     # [B, K]
        count, done, failed = self._cut(state, verdict, emitted, logits)
        tokens = _append(state.tokens, state.length, emitted, count)
        cache = commit(state.cache, out.kv, verdict.path, count, self.model.config.kernels)
        length = state.length + count
        advance = Advance(emitted, count, state.length - 1, _rows(out.hidden, verdict.path),
                          _rows(out.taps, verdict.path))
        ctx = self._context(params, tokens, length, cache, state.key)
        own = self.drafter.observe(params.get("draft"), own, advance, Step(draft, block, out, logits, verdict), ctx)
        active = (~state.done).astype(jnp.int32)
        accepted_at, proposed_at = tree.by_depth(draft, verdict)
        info = StepInfo(
            emitted=count, accepted=active * (verdict.count - 1), proposed=active * draft.valid[:, 1:].sum(1),
            target_forwards=active, target_rows=active * rows, draft_forwards=active * draft.forwards,
            draft_rows=active * draft.rows, failed=failed.astype(jnp.int32),
            accepted_at=active[:, None] * accepted_at, proposed_at=active[:, None] * proposed_at)
        return DecodeState(tokens, length, state.limit, done, state.key, cache, own), info

    def _forward(self, params, draft, block: Block, state: DecodeState):
        """(output, logits, rows computed): the whole block, or the roots alone if no unfinished sequence has a draft.

        A step without a draft then costs what a plain step costs. Rows that were not computed are zero; no valid node
        is among them.
        """
        size = block.tokens.shape[1]

        def run(width):
            part = Block(block.tokens[:, :width], block.positions[:, :width], block.visible[..., :width, :width])
            out = self.model.forward(params, part, state.cache)
            logits = self.model.unembed(params, out.hidden)
            kv = KV(*(tuple(_widen(x, size) for x in side) for side in out.kv[:2]), block.positions)
            return Output(_widen(out.hidden, size), _widen(out.taps, size), kv), _widen(logits, size)

        if size == 1 or draft.certain:
            return *run(size), size
        drafted = (draft.valid[:, 1:].any(1) & ~state.done).any()
        return *lax.cond(drafted, lambda: run(size), lambda: run(1)), jnp.where(drafted, size, 1)

    @staticmethod
    def _emitted(draft, verdict):
        """The tokens behind the accepted rows: the drafts of the path, then the target's own."""
        path = jnp.take_along_axis(draft.tokens, verdict.path, 1)
        shifted = jnp.concatenate([path[:, 1:], verdict.next[:, None]], 1)
        return jnp.where(jnp.arange(path.shape[1]) == verdict.count[:, None] - 1, verdict.next[:, None], shifted)

    def _cut(self, state, verdict, emitted, logits):
        """(tokens to keep, done, failed): the one place that knows of limit, end of text and broken logits."""
        index = jnp.arange(emitted.shape[1])
        count = jnp.minimum(verdict.count, state.limit - state.length)
        ends = jnp.zeros(emitted.shape, bool)
        for eos in self.eos:
            ends = ends | (emitted == eos)
        ends = ends & (index < count[:, None])
        ended = ends.any(1)
        count = jnp.where(ended, jnp.argmax(ends, 1) + 1, count)
        # Two tests: on a CPU the maximum of a wide row passes over a NaN.
        broken = jnp.isnan(logits[:, 0]).any(-1) | ~jnp.isfinite(logits[:, 0].max(-1))
        failed = ~state.done & broken
        count = jnp.where(state.done | failed, 0, count).astype(jnp.int32)
        done = state.done | ended | failed | (state.length + count >= state.limit)
        return count, done, failed

    def _context(self, params, tokens, length, cache, keys) -> Context:
        return Context(self.model, params["target"], tokens, length, cache, keys)


def _append(tokens, length, new, count):
    """Writes `new[b, :count[b]]` behind `length[b]`."""
    offset = jnp.arange(tokens.shape[1]) - length[:, None]
    values = jnp.take_along_axis(new, jnp.clip(offset, 0, new.shape[1] - 1), 1)
    return jnp.where((offset >= 0) & (offset < count[:, None]), values, tokens)


def _widen(values, size: int):
    """[B, T, ...] with zero rows up to [B, size, ...]."""
    return jnp.pad(values, [(0, 0), (0, size - values.shape[1])] + [(0, 0)] * (values.ndim - 2))


def _rows(values: Any, rows):
    """values[b, rows[b]] for values [B, T, ...]."""
    return jax.vmap(lambda v, r: v[r])(values, rows)
