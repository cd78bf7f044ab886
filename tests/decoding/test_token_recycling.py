"""Token recycling against a table kept in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Shape, TokenRecycling, loop, make_decoder, tree
from parallax.decoding.base import Advance, Context, Step
from parallax.testing import Case

VOCAB = 6


@pytest.fixture(scope="module")
def case():
    return Case.tiny()


def _fill(shape, table, pending):
    """(token, valid) of every node of one sequence."""
    nodes = [(pending, True)]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:]):
        token, valid = nodes[parent]
        child = table[token][rank]
        nodes.append((max(child, 0), valid and child >= 0))
    return nodes


def _learn(table, nodes, logits):
    """Writes the best tokens behind every valid node, in the order of the nodes."""
    ranks = len(table[0])
    for (token, valid), row in zip(nodes, logits):
        if valid:
            table[token] = sorted(range(len(row)), key=lambda i: (-row[i], i))[:ranks]


def _context(tokens, length):
    return Context(None, None, jnp.asarray(tokens), jnp.asarray(length), None, None)


def _observe(drafter, table, draft, logits, count):
    advance = Advance(None, jnp.asarray(count), None, None, None)
    return np.asarray(drafter.observe(None, jnp.asarray(table), advance, Step(draft, None, None, logits, None), None))


@pytest.mark.parametrize("seed", range(4))
def test_tree_and_table_are_those_of_a_plain_simulation(seed):
    drafter, random = TokenRecycling(nodes=9, max_depth=3, ranks=3), np.random.default_rng(seed)
    table = random.integers(-1, VOCAB, (3, VOCAB, 3)).astype(np.int32)     # -1: nothing known of that rank
    tokens, length = random.integers(0, VOCAB, (3, 5)), np.asarray([5, 1, 3])
    draft, own = drafter.propose(None, jnp.asarray(table), _context(tokens, length))
    np.testing.assert_array_equal(own, table)
    assert (draft.parents, draft.depth, draft.kind) == (drafter.shape.parents, drafter.depth, "deterministic")
    logits = jnp.asarray(random.integers(0, 4, (3, 10, VOCAB)), jnp.float32)                 # with ties
    after = _observe(drafter, table, draft, logits, [2, 1, 0])
    for b in range(3):
        nodes = _fill(drafter.shape, table[b].tolist(), int(tokens[b, length[b] - 1]))
        assert draft.valid[b].tolist() == [valid for _, valid in nodes]
        assert [t for t, v in zip(draft.tokens[b].tolist(), draft.valid[b]) if v] == [t for t, v in nodes if v]
        wanted = table[b].tolist()
        if b != 2:                                                         # the last sequence is finished: count 0
            _learn(wanted, nodes, np.asarray(logits[b]))
        assert after[b].tolist() == wanted


def test_of_a_token_at_several_nodes_the_last_valid_one_stays():
    drafter = TokenRecycling(nodes=3, max_depth=3, ranks=1)
    table = np.full((1, VOCAB, 1), -1, np.int32)
    table[0, 2], table[0, 4] = 4, 2                                        # 2, 4, 2, 4
    draft, _ = drafter.propose(None, jnp.asarray(table), _context([[2]], [1]))
    logits = jax.nn.one_hot(jnp.asarray([[0, 1, 3, 5]]), VOCAB)
    assert draft.tokens.tolist() == [[2, 4, 2, 4]]
    assert _observe(drafter, table, draft, logits, [1])[0, :, 0].tolist() == [-1, -1, 3, -1, 5, -1]
    cut = draft.replace(valid=jnp.asarray([[True, True, False, False]]))
    assert _observe(drafter, table, cut, logits, [1])[0, :, 0].tolist() == [-1, -1, 0, -1, 1, -1]


def test_the_table_after_each_step_of_the_loop_is_that_of_a_plain_simulation(case):
    decoder = make_decoder("token_recycling", case.model, nodes=5, max_depth=3, ranks=3)
    inputs = case.inputs(decoder, limits=[18, 3, 24])
    state = loop.prefill(inputs, case.capacity)
    assert state.own.shape == (3, case.model.config.vocab_size, 3)
    tables = np.full(state.own.shape, -1).tolist()
    for table, prompt in zip(tables, case.prompts):
        for token, following in zip(prompt, prompt[1:]):
            table[token] = [following, -1, -1]                             # of a repeated token, the last one stays
    assert np.asarray(state.own).tolist() == tables
    raw = jax.jit(_raw_step)
    while not np.asarray(state.done).all():
        draft, logits = raw(decoder, inputs.params, state)
        pending = [int(row[end - 1]) for row, end in zip(np.asarray(state.tokens), np.asarray(state.length))]
        done = np.asarray(state.done)
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        for b in range(3):
            nodes = _fill(decoder.drafter.shape, tables[b], pending[b])
            assert draft.valid[b].tolist() == [valid for _, valid in nodes]
            if not done[b]:
                _learn(tables[b], nodes, np.asarray(logits[b]))
                assert info.proposed[b] == sum(valid for _, valid in nodes[1:])
        assert np.asarray(state.own).tolist() == tables


def _raw_step(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    draft, _ = decoder.drafter.propose(None, state.own, ctx)
    out = decoder.model.forward(params["target"], tree.block(draft, state.length), state.cache)
    return draft, decoder.model.unembed(params["target"], out.hidden)


def test_the_prompt_is_learned_only_on_request(case):
    decoder = make_decoder("token_recycling", case.model, nodes=5, max_depth=3, ranks=3, learn_prompt=False)
    assert (np.asarray(loop.prefill(case.inputs(decoder), case.capacity).own) == -1).all()


def test_an_empty_table_drafts_nothing(case):
    drafter = TokenRecycling()
    own = jnp.full((2, VOCAB, drafter.ranks), -1, jnp.int32)
    draft, _ = drafter.propose(None, own, _context([[3, 1], [5, 0]], [2, 1]))
    assert draft.tokens[:, 0].tolist() == [1, 5]
    assert draft.valid.sum(1).tolist() == [1, 1]


def test_every_option_shapes_the_tree():
    base = TokenRecycling(nodes=7, max_depth=6, ranks=8)
    assert base == TokenRecycling()
    assert len(base.shape.parents) == 8 and base.depth == base.shape.depth <= 6
    assert len(dataclasses.replace(base, nodes=30).shape.parents) == 31
    assert dataclasses.replace(base, nodes=30, max_depth=2).depth == 2
    assert max(dataclasses.replace(base, nodes=30, ranks=3).shape.ranks) == 2
    assert TokenRecycling(nodes=4, max_depth=4, ranks=1).shape == Shape.chain(4)


@pytest.mark.parametrize("options, message", [
    (dict(nodes=0), "nodes must be at least 1, got 0"), (dict(max_depth=0), "max_depth .* got 0"),
    (dict(ranks=0), "ranks .* got 0"), (dict(ranks=9), "ranks must be at most 8, got 9"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenRecycling(**options)
