"""What must hold of every decoder, whatever it does inside. Each check raises AssertionError saying what was violated.

B sequences, P prompt slots, N token slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallax.decoding import loop, tree
from parallax.decoding.base import Context, Decoder, StepInfo
from parallax.decoding.sampling import Greedy, Sampler
from parallax.models import Block, Cache, Model
from parallax.testing.reference import reference_decode
from parallax.testing.tiny import tiny_model


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, ragged prompts of width P, and how long they may grow.

    params: {"target": ..., "draft": ...}; draft parameters with a leading batch axis are taken row by row where
    `draft_rows` says so.
    """

    model: Model
    params: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = 24
    seed: int = 3
    draft_rows: bool = False

    @classmethod
    def tiny(cls, **changes) -> Case:
        """Three prompts of 12, 1 and 5 tokens for `testing.tiny_model(**changes)`."""
        model, params = tiny_model(**changes)
        draw = np.random.default_rng(0).integers(0, model.config.vocab_size, 18).tolist()
        return cls(model, {"target": params}, (tuple(draw[:12]), tuple(draw[12:13]), tuple(draw[13:])))

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))

    @property
    def capacity(self) -> int:
        return self.width + self.new_tokens

    def inputs(self, decoder: Decoder, rows: Sequence[int] | None = None,
               limits: Sequence[int] | None = None) -> loop.Inputs:
        """Arguments of the loop for some of the prompts (row ids stay theirs), with the longest limits by default."""
        rows = range(len(self.prompts)) if rows is None else rows
        prompt = np.zeros((len(rows), self.width), np.int32)
        for i, row in enumerate(rows):
            prompt[i, :len(self.prompts[row])] = self.prompts[row]
        lengths = np.asarray([len(self.prompts[row]) for row in rows])
        params = self.params
        if self.draft_rows:
            params = {**params, "draft": jax.tree.map(lambda x: x[np.asarray(rows)], params["draft"])}
        limits = lengths + self.new_tokens if limits is None else np.asarray(limits)
        return loop.cast(decoder, params, prompt, lengths, np.asarray(rows), self.seed, limits, capacity=self.capacity)

    def reference(self, sampler: Sampler) -> list[list[int]]:
        """What plain decoding writes, by `reference_decode`."""
        return [reference_decode(self.model, self.params["target"], prompt, len(prompt) + self.new_tokens,
                                 sampler=sampler, seed=self.seed, row_id=i)
                for i, prompt in enumerate(self.prompts)]


def texts(result) -> list[list[int]]:
    """The decided tokens of every row."""
    return [np.asarray(row)[:end].tolist() for row, end in zip(result.tokens, np.asarray(result.length))]


def check_equals_plain_decoding(decoder: Decoder, case: Case) -> None:
    """Class `exact`: token for token what the cache-free reference writes."""
    result = loop.run(case.inputs(decoder), case.capacity)
    expected = case.reference(_sampler(decoder))
    for i, (ours, theirs) in enumerate(zip(texts(result), expected)):
        assert ours == theirs, f"row {i} differs from plain decoding: {ours} against {theirs}"


def check_every_step(decoder: Decoder, case: Case) -> None:
    """After prefill and every step: lengths, counters and zeros are in order; the cache equals a fresh prefill."""
    inputs = case.inputs(decoder)
    state = loop.prefill(inputs, case.capacity)
    _check_cache(case, state)
    before = np.asarray(state.length)
    finished = np.asarray(state.done)
    while not finished.all():
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        info, length = jax.tree.map(np.asarray, info), np.asarray(state.length)
        assert (length - before == info.emitted).all(), f"emitted {info.emitted}, but lengths grew by {length - before}"
        for name, counts in info._asdict().items():
            assert not counts[finished].any(), f"{name} counts {counts} in a finished sequence"
        assert (info.target_forwards[~finished] == 1).all(), "a step is one target forward"
        assert (info.emitted[~finished] >= 1).all(), "a step of an unfinished sequence emits at least one token"
        assert (info.accepted <= info.proposed).all(), f"accepted {info.accepted} of {info.proposed}"
        assert (info.accepted_at <= info.proposed_at).all(), "accepted a token that was not offered"
        assert (info.accepted_at.sum(1) == info.accepted).all(), "the depths do not add up to the accepted tokens"
        assert (length <= np.asarray(state.limit)).all(), "a sequence is longer than its limit"
        behind = np.arange(case.capacity) >= length[:, None]
        assert not np.asarray(state.tokens)[behind].any(), "there are tokens behind the length"
        _check_cache(case, state)
        before, finished = length, np.asarray(state.done)


def check_batch_independence(decoder: Decoder, case: Case) -> None:
    """A row alone, and the batch reversed, give the same tokens and counters.

    All but the rows computed: a batch runs the whole block as soon as one of its sequences has a draft.
    """
    whole = loop.run(case.inputs(decoder), case.capacity)
    rows = list(range(len(case.prompts)))
    for subset in ([rows[0]], [rows[-1]], rows[::-1]):
        part = loop.run(case.inputs(decoder, subset), case.capacity)
        for i, row in enumerate(subset):
            assert texts(part)[i] == texts(whole)[row], f"row {row} depends on the batch {subset}"
            for name in set(StepInfo._fields) - {"target_rows"}:
                ours, theirs = (np.asarray(getattr(r.info, name)[k]).tolist() for r, k in ((part, i), (whole, row)))
                assert ours == theirs, f"{name} of row {row} depends on the batch {subset}: {ours} against {theirs}"


def check_no_recompilation(decoder: Decoder, case: Case) -> None:
    """Other prompts, lengths, limits and seeds run the same program. Counts compiled programs, not only traces."""
    loop.run(case.inputs(decoder), case.capacity)
    compiled = loop.run._cache_size()
    other = dataclasses.replace(case, prompts=tuple(p[::-1] for p in case.prompts), seed=case.seed + 1)
    limits = [min(len(p) + i, case.capacity) for i, p in enumerate(case.prompts)]
    loop.run(other.inputs(decoder, limits=limits), case.capacity)
    assert loop.run._cache_size() == compiled, "other values of the same shape compiled another program"


def check_end_of_text(decoder: Decoder, case: Case) -> None:
    """Ends right behind the first end-of-text token, wherever it falls in an accepted block."""
    whole = _uncut(decoder, case)
    for token in dict.fromkeys(whole[0][len(case.prompts[0]):][2:9:3]):
        ended = dataclasses.replace(decoder, eos=(token,))
        result = loop.run(case.inputs(ended), case.capacity)
        for row, prompt, ours in zip(whole, case.prompts, texts(result)):
            new = row[len(prompt):]
            theirs = row[:len(prompt) + new.index(token) + 1] if token in new else row
            assert ours == theirs, f"prompt {prompt} with end of text {token}: {ours} against {theirs}"


def check_limits(decoder: Decoder, case: Case) -> None:
    """Stops exactly at each row's limit, also when nothing may be written or a draft would reach beyond."""
    expected = _uncut(decoder, case)
    for extra in ((0, 1, 2), (3, case.new_tokens, 0)):
        limits = [len(p) + extra[i % 3] for i, p in enumerate(case.prompts)]
        result = loop.run(case.inputs(decoder, limits=limits), case.capacity)
        for i, ours in enumerate(texts(result)):
            assert ours == expected[i][:limits[i]], f"row {i} with limit {limits[i]} wrote {ours}"


def check_stream_equals_decode(decoder: Decoder, case: Case) -> None:
    """The host-driven loop gives the same tokens and counters, and never takes a token back."""
    inputs = case.inputs(decoder)
    whole = loop.run(inputs, case.capacity)
    seen: list[list[int]] = [list(prompt) for prompt in case.prompts]
    for part in loop.stream(decoder, inputs.params, inputs.prompt, inputs.prompt_length, inputs.row_ids, case.seed,
                            inputs.limit, capacity=case.capacity, steps=3):
        for old, new in zip(seen, texts(part)):
            assert new[:len(old)] == old, f"streamed tokens changed: {old} became {new}"
        seen = texts(part)
    assert seen == texts(whole), "stream and decode differ"
    for name, counts in part.info._asdict().items():
        assert (counts == np.asarray(getattr(whole.info, name))).all(), f"{name} of stream and decode differ"


def check_tree_mask(decoder: Decoder, case: Case) -> None:
    """One forward over a whole draft gives every node the logits that its path from the root has alone."""
    inputs = case.inputs(decoder)
    state = loop.prefill(inputs, case.capacity)
    for _ in range(3):
        whole, alone = _nodes(inputs.decoder, inputs.params, state)
        apart = np.abs(np.asarray(whole) - np.asarray(alone)).max(-1)
        scale = max(1.0, float(np.abs(np.asarray(alone)).max()))
        b, node = np.unravel_index(apart.argmax(), apart.shape)
        assert apart.max() < 1e-4 * scale, (f"the logits of node {node} of row {b} are {apart.max():.1e} off those of "
                                           "its path alone")
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(2))


@jax.jit
def _nodes(decoder: Decoder, params, state):
    """Logits [B, T, V] of a draft's nodes: from its block, and of every node's own path as a chain."""
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    draft, _ = decoder.drafter.propose(params.get("draft"), state.own, ctx)
    model, batch, size = decoder.model, *draft.tokens.shape

    def logits(block):
        return model.unembed(params["target"], model.forward(params["target"], block, state.cache).hidden)

    parents = jnp.broadcast_to(jnp.asarray(draft.parents), (batch, size))
    deep = draft.depth + 1
    above = [jnp.broadcast_to(jnp.arange(size), (batch, size))]                 # a node, its parent, ... the root
    for _ in range(draft.depth):
        above.append(jnp.take_along_axis(parents, above[-1], 1))
    above = jnp.stack(above[::-1], -1)                                           # [B, T, D + 1], the root perhaps often
    level = (above != 0).sum(-1)
    # Of the leading roots one stays: the path moves to the front, and what follows it repeats its last node.
    order = jnp.minimum(jnp.arange(deep) + draft.depth - level[..., None], draft.depth)
    paths = jnp.take_along_axis(above, order, 2)

    def alone(path, level):                                                      # [B, D + 1], [B]
        block = Block(jnp.take_along_axis(draft.tokens, path, 1), state.length[:, None] - 1 + jnp.arange(deep),
                      jnp.tril(jnp.ones((deep, deep), bool)))
        return jnp.take_along_axis(logits(block), level[:, None, None], 1)[:, 0]

    separate = jax.lax.map(lambda node: alone(*node), (paths.swapaxes(0, 1), level.swapaxes(0, 1)))
    return logits(tree.block(draft, state.length)), separate.swapaxes(0, 1)


CHECKS: dict[str, Callable[[Decoder, Case], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (check_equals_plain_decoding, check_every_step, check_batch_independence, check_no_recompilation,
                  check_end_of_text, check_limits, check_stream_equals_decode, check_tree_mask)
}


def checks_of(decoder: Decoder) -> tuple[str, ...]:
    """Names of the checks that a decoder of this guarantee must pass: only `exact` promises plain decoding's tokens."""
    return tuple(name for name in CHECKS if decoder.guarantee == "exact" or name != "equals_plain_decoding")


def check_all(decoder: Decoder, case: Case) -> None:
    """All invariants of the decoder's guarantee. Whether `distribution` holds is for `p_value` to say."""
    for name in checks_of(decoder):
        CHECKS[name](decoder, case)


def check_cache(model: Model, params, tokens, cache: Cache) -> None:
    """The committed region equals what one forward over the committed tokens [B, N] computes."""
    fresh = _fresh(model, params, tokens)
    for name in ("k", "v"):
        kept = np.stack([np.asarray(layer) for layer in getattr(cache, name)])                 # [L, B, Hkv, S, D]
        for b, end in enumerate(np.asarray(cache.length)):
            wanted = np.asarray(getattr(fresh, name))[:, b, :end].swapaxes(1, 2)
            np.testing.assert_allclose(kept[:, b, :, :end], wanted, atol=2e-4,
                                       err_msg=f"{name} of row {b} is not what a fresh prefill of {end} tokens gives")


def _uncut(decoder: Decoder, case: Case) -> list[list[int]]:
    """What it writes where nothing cuts: by the reference, or, if it need not write that, by itself."""
    if decoder.guarantee == "exact":
        return case.reference(_sampler(decoder))
    return texts(loop.run(case.inputs(decoder), case.capacity))


def _sampler(decoder: Decoder) -> Sampler:
    """With its numbers as the loop sees them, so that the reference warps the same float32 values."""
    return jax.tree.map(jnp.float32, getattr(decoder.verifier, "sampler", Greedy()))


def _check_cache(case: Case, state) -> None:
    length = np.asarray(state.cache.length)
    assert (length == np.asarray(state.length) - 1).all(), f"cache holds {length} of {state.length} tokens"
    check_cache(case.model, case.params["target"], state.tokens, state.cache)


_FRESH: dict = {}


def _fresh(model: Model, params, tokens):
    size = tokens.shape[1]
    if (model, tokens.shape) not in _FRESH:
        def forward(params, tokens):
            positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
            block = Block(tokens, positions, jnp.tril(jnp.ones((size, size), bool)))
            kv = model.forward(params, block, model.new_cache(tokens.shape[0], 0)).kv
            return kv._replace(k=jnp.stack(kv.k), v=jnp.stack(kv.v))
        _FRESH[model, tokens.shape] = jax.jit(forward)
    return _FRESH[model, tokens.shape](params, tokens)
