"""What a step accepts, emits and counts, where the right answers are known."""

import dataclasses
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, Follow, Greedy, Nothing, Shape, Speculative, decode, loop, stream
from parallax.decoding.base import Guarantee, policy
from parallax.testing import MarkovModel, OracleDrafter

SIZE, PROMPT, NEW = 37, 2, 11
CAPACITY = PROMPT + NEW
# Greedy text counts upwards, so no token comes twice.
MODEL, TARGET = MarkovModel.create(np.roll(np.eye(SIZE, dtype=np.float32) * 9, 1, 1))
PROMPTS = np.asarray([[4, 5], [20, 21]])
ANSWERS = PROMPTS[:, :1] + np.arange(CAPACITY + 8)
TREE = Shape.paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 0, 0), (1, 1, 0)])


def run(drafter, limit=CAPACITY, eos=(), verifier=Follow()):
    decoder = Speculative(model=MODEL, drafter=drafter, verifier=verifier, eos=eos)
    result = decode(decoder, {"target": TARGET, "draft": ANSWERS}, PROMPTS, PROMPT, None, 0, limit, capacity=CAPACITY)
    return jax.tree.map(np.asarray, result)


@pytest.mark.parametrize("shape, right, accepted", [
    (Shape.chain(0), (), 0),
    (Shape.chain(4), (True,) * 4, 4),
    (Shape.chain(4), (False,) * 4, 0),
    (Shape.chain(4), (False, True, True, True), 0),
    (Shape.chain(4), (True, True, False, True), 2),
    (Shape.chain(4), (True, True, True, False), 3),
    (TREE, (True, True, False), 2),
    (TREE, (True, False, False), 1),
])
def test_counts_are_exactly_those_of_the_pattern(shape, right, accepted):
    result = run(OracleDrafter(shape=shape, right=right))
    np.testing.assert_array_equal(result.tokens, ANSWERS[:, :CAPACITY])
    assert result.length.tolist() == [CAPACITY] * 2
    forwards = -(-NEW // (accepted + 1))
    levels = np.arange(1, shape.depth + 1)
    counts = {name: counts.tolist() for name, counts in result.info._asdict().items()}
    assert counts.pop("accepted_at") == [[forwards * int(level <= accepted) for level in levels]] * 2
    offered = counts.pop("proposed_at")
    if shape is not TREE:                                # in a tree not every accepted node has children
        assert offered == [[forwards * int(level <= accepted + 1) for level in levels]] * 2
    assert counts == dict(
        emitted=[NEW] * 2, accepted=[accepted * forwards] * 2, proposed=[(len(shape.parents) - 1) * forwards] * 2,
        target_forwards=[forwards] * 2, target_rows=[len(shape.parents) * forwards] * 2, draft_forwards=[0] * 2,
        draft_rows=[0] * 2, failed=[0] * 2)


def test_tokens_per_forward_are_those_of_the_depth():
    new = 10                                                              # two whole blocks of five
    info = run(OracleDrafter(shape=Shape.chain(4), right=(True,) * 4), limit=PROMPT + new).info
    assert (info.emitted / info.target_forwards).tolist() == [5.0, 5.0]
    assert (run(Nothing()).info.emitted == run(Nothing()).info.target_forwards).all()


@pytest.mark.parametrize("place", [1, 3, 5, 6, 10])
def test_ends_behind_an_end_of_text_anywhere_in_an_accepted_block(place):
    drafter = OracleDrafter(shape=Shape.chain(4), right=(True,) * 4)
    end = int(ANSWERS[0, PROMPT + place - 1])                             # the other sequence never writes it
    result = run(drafter, eos=(end, SIZE - 1))
    assert result.length.tolist() == [PROMPT + place, CAPACITY]
    assert result.tokens[0].tolist() == [*ANSWERS[0, :PROMPT + place], *[0] * (NEW - place)]
    assert result.info.emitted.tolist() == [place, NEW]
    assert result.info.target_forwards.tolist() == [-(-place // 5), 3]
    assert result.info.accepted.tolist() == [-(-place // 5) * 4, 12]      # what was accepted, also behind the end


def test_an_end_of_text_in_the_prompt_or_behind_the_limit_ends_nothing():
    drafter = OracleDrafter(shape=Shape.chain(4), right=(True,) * 4)
    result = run(drafter, limit=PROMPT + 3, eos=(int(PROMPTS[0, 1]), int(ANSWERS[0, PROMPT + 3])))
    np.testing.assert_array_equal(result.tokens[:, :PROMPT + 3], ANSWERS[:, :PROMPT + 3])
    assert result.length.tolist() == [PROMPT + 3] * 2


@pytest.mark.parametrize("extra", [(0, 0), (0, 1), (4, 6), (11, 5)])
def test_a_block_that_reaches_over_the_limit_is_cut(extra):
    result = run(OracleDrafter(shape=Shape.chain(4), right=(True,) * 4), limit=PROMPT + np.asarray(extra))
    assert result.info.emitted.tolist() == list(extra)
    assert result.info.target_forwards.tolist() == [-(-count // 5) for count in extra]
    for tokens, answer, count in zip(result.tokens, ANSWERS, extra):
        assert tokens.tolist() == [*answer[:PROMPT + count], *[0] * (NEW - count)]


def test_streamed_steps_are_counted_one_by_one():
    decoder = Speculative(model=MODEL, drafter=OracleDrafter(shape=Shape.chain(4), right=(True, True, False, True)))
    parts = list(stream(decoder, {"target": TARGET, "draft": ANSWERS}, PROMPTS, PROMPT, None, 0, [CAPACITY, PROMPT + 4],
                        capacity=CAPACITY))
    assert [part.info.emitted.tolist() for part in parts] == [[3, 3], [6, 4], [9, 4], [11, 4]]
    assert [part.info.accepted.tolist() for part in parts] == [[2, 2], [4, 4], [6, 4], [8, 4]]
    assert [part.info.target_forwards.tolist() for part in parts] == [[1, 1], [2, 2], [3, 2], [4, 2]]


@policy
class Costly(OracleDrafter):
    """Says what drafting cost, gives up its last node, and counts what it is told."""

    def init(self, params, ctx, prompt, prompt_length):
        return jnp.zeros((prompt.shape[0], 2), jnp.int32)

    def propose(self, params, own, ctx):
        draft, _ = super().propose(params, own, ctx)
        return draft.replace(valid=draft.valid.at[:, -1].set(False), forwards=2, rows=7), own

    def observe(self, params, own, advance, step, ctx):
        rows = jnp.arange(advance.tokens.shape[1])
        right = jnp.take_along_axis(params, advance.start[:, None] + 1 + rows, 1)
        told = (rows < advance.count[:, None]) & (advance.tokens == right)
        return own.at[:, 0 if step is None else 1].add(told.sum(1))


def test_invalid_nodes_are_never_accepted_and_the_cost_of_drafting_is_counted():
    drafter = Costly(shape=Shape.chain(4), right=(True,) * 4)
    result = run(drafter, limit=[CAPACITY, PROMPT + 4])
    np.testing.assert_array_equal(result.tokens[0], ANSWERS[0, :CAPACITY])
    info = result.info
    assert info.target_forwards.tolist() == [3, 1]                        # blocks of 4: the last node is never taken
    assert info.accepted.tolist() == [9, 3] and info.proposed.tolist() == [9, 3]
    assert info.draft_forwards.tolist() == [6, 2] and info.draft_rows.tolist() == [21, 7]


def test_a_drafter_is_told_every_committed_row_once_and_the_token_behind_it():
    decoder = Speculative(model=MODEL, drafter=Costly(shape=Shape.chain(4), right=(True,) * 4))
    inputs = loop.cast(decoder, {"target": TARGET, "draft": ANSWERS}, PROMPTS, PROMPT, None, 0, [CAPACITY, PROMPT + 4],
                       capacity=CAPACITY)
    state = loop.prefill(inputs, CAPACITY)
    assert state.own.tolist() == [[PROMPT - 1, 0]] * 2
    state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(100))
    assert state.own.tolist() == [[PROMPT - 1, NEW], [PROMPT - 1, 4]]


@policy
class Loose(Follow):
    guarantee: ClassVar[str] = "lossy"
    kinds: ClassVar[tuple[str, ...]] = ("deterministic",)


@policy
class Guess(Nothing):
    def propose(self, params, own, ctx):
        draft, own = super().propose(params, own, ctx)
        return draft.replace(kind="sampled"), own


def test_the_guarantee_is_that_of_the_verifier():
    assert Speculative(model=MODEL).guarantee == Follow.guarantee == "exact"
    assert Speculative(model=MODEL, drafter=Guess(), verifier=Loose()).guarantee == "lossy"
    assert {Follow.guarantee, Loose.guarantee} <= set(typing.get_args(Guarantee))


def test_a_verifier_refuses_drafts_of_a_kind_it_cannot_verify():
    with pytest.raises(ValueError, match="Loose cannot verify a sampled draft: it takes deterministic"):
        run(Guess(), verifier=Loose())
    assert run(Guess()).info.emitted.tolist() == [NEW] * 2                # sample and follow takes any
    assert run(Nothing(), verifier=Loose()).info.emitted.tolist() == [NEW] * 2


@policy
class Declared(Guess):
    kind: ClassVar[str] = "sampled"


def test_a_kind_that_is_known_is_refused_before_anything_compiles(monkeypatch):
    monkeypatch.setattr(Speculative, "init", None)
    with pytest.raises(ValueError, match="Loose cannot verify a sampled draft: it takes deterministic"):
        run(Declared(), verifier=Loose())


@policy
class Fickle(OracleDrafter):
    """Says that it always has a draft, and never has one."""

    def propose(self, params, own, ctx):
        draft, own = super().propose(params, own, ctx)
        return draft.replace(valid=jnp.zeros_like(draft.valid).at[:, 0].set(True), certain=True), own


def test_a_draft_that_is_certain_is_run_as_a_whole_in_every_step():
    result = run(Fickle(shape=Shape.chain(4), right=(True,) * 4))
    assert result.info.target_rows.tolist() == [5 * NEW] * 2 and result.info.emitted.tolist() == [NEW] * 2
    np.testing.assert_array_equal(result.tokens, ANSWERS[:, :CAPACITY])


def test_two_decoders_of_equal_parts_are_one_program():
    drafter = OracleDrafter(shape=Shape.chain(4), right=(True,) * 4)
    one, other = (Speculative(model=MODEL, drafter=d) for d in (drafter, dataclasses.replace(drafter)))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.structure(one) != jax.tree.structure(dataclasses.replace(one, chunk=2))
    assert jax.tree.structure(Draft(0, 0, 0, depth=1)) != jax.tree.structure(Draft(0, 0, 0, depth=2))


def test_parts_of_different_classes_are_never_one_program():
    for one, other in ((Follow(), Loose()), (Nothing(), Guess()), (Nothing(), Greedy())):
        assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.structure(Follow()) == jax.tree.structure(Follow())
