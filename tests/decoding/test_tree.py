"""Tree shapes, ancestor masks and the walk, against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import Draft, Shape, tree

SIZE = 7                                                                  # nodes of the random trees


@st.composite
def trees(draw, size=SIZE):
    return [0] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


def line(parents, node):
    """The nodes from the root down to `node`."""
    return ([] if node == 0 else line(parents, parents[node])) + [node]


def test_a_chain_is_one_line():
    shape = Shape.chain(3)
    assert (shape.parents, shape.ranks, shape.depths, shape.depth) == ((0, 0, 1, 2), (0, 0, 0, 0), (0, 1, 2, 3), 3)
    assert Shape.chain(0) == Shape((0,), (0,))
    assert Shape.chain(0).depth == 0


def test_paths_add_their_prefixes_and_sort_by_depth():
    shape = Shape.paths([(1, 0), (0,), (1, 2, 0)])
    assert shape.parents == (0, 0, 0, 2, 2, 4)
    assert shape.ranks == (0, 0, 1, 0, 2, 0)
    assert shape.depths == (0, 1, 1, 2, 2, 3)
    assert Shape.paths([]) == Shape.chain(0)
    assert Shape.paths([(0,), (0, 0), (0, 0, 0), (0,)]) == Shape.chain(3)


def accepted(paths, acceptance):
    """Expected accepted tokens of a tree in the rank model."""
    return sum(np.prod([acceptance[rank] for rank in path]) for path in paths)


def ranks_of(shape):
    return [tuple(shape.ranks[node] for node in line(shape.parents, i)[1:]) for i in range(1, len(shape.parents))]


@pytest.mark.parametrize("acceptance", [(0.6, 0.3), (0.9, 0.05), (0.4, 0.35, 0.2), (0.2, 0.5, 0.1)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_best_first_accepts_the_most_of_all_trees_of_its_size(acceptance, depth):
    every = [path for d in range(1, depth + 1) for path in itertools.product(range(len(acceptance)), repeat=d)]
    for nodes in (1, 2, 3, 4):
        best = 0
        for chosen in itertools.combinations(every, min(nodes, len(every))):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                best = max(best, accepted(chosen, acceptance))
        shape = Shape.best_first(nodes, depth, acceptance)
        assert len(shape.parents) == 1 + min(nodes, len(every))
        assert shape.depth <= depth
        assert accepted(ranks_of(shape), acceptance) == pytest.approx(best)


@settings(deadline=None, max_examples=40)
@given(parents=trees())
def test_depths_and_ancestors_are_those_of_each_line(parents):
    depths = [len(line(parents, node)) - 1 for node in range(SIZE)]
    seen = np.asarray([[other in line(parents, node) for other in range(SIZE)] for node in range(SIZE)])
    for form in (tuple(parents), np.asarray(parents)):
        np.testing.assert_array_equal(tree.depths(form, max(depths)), depths)
        np.testing.assert_array_equal(tree.ancestors(form, max(depths)), seen)
        assert isinstance(tree.depths(form, SIZE), np.ndarray) and isinstance(tree.ancestors(form, SIZE), np.ndarray)
    np.testing.assert_array_equal(_depths(np.asarray(parents)), depths)
    np.testing.assert_array_equal(_ancestors(np.asarray(parents)), seen)


_depths = jax.jit(lambda parents: tree.depths(parents, SIZE - 1))
_ancestors = jax.jit(lambda parents: tree.ancestors(parents, SIZE - 1))


def test_parents_of_a_batch_are_read_row_by_row():
    rows = np.asarray([[0, 0, 1, 2, 3, 4, 5], [0] * SIZE, [0, 0, 0, 1, 1, 2, 2]])
    for xp in (np, jnp):
        for function in (tree.depths, tree.ancestors):
            together = function(xp.asarray(rows), SIZE - 1)
            np.testing.assert_array_equal(together, [function(tuple(row.tolist()), SIZE - 1) for row in rows])


@settings(deadline=None, max_examples=20)
@given(rows=st.lists(trees(), min_size=2, max_size=2), lengths=st.lists(st.integers(1, 50), min_size=2, max_size=2))
def test_a_block_puts_each_node_behind_its_line(rows, lengths):
    tokens = jnp.arange(2 * SIZE).reshape(2, SIZE)
    for parents, each in ((tuple(rows[0]), [rows[0]] * 2), (jnp.asarray(rows), rows)):
        draft = Draft(tokens, parents, jnp.ones((2, SIZE), bool), depth=SIZE - 1)
        block = tree.block(draft, jnp.asarray(lengths))
        visible = np.broadcast_to(block.visible, (2, SIZE, SIZE))
        assert block.tokens is tokens
        for b, node in np.ndindex(2, SIZE):
            above = line(each[b], node)
            assert block.positions[b, node] == lengths[b] - 1 + len(above) - 1
            assert np.flatnonzero(visible[b, node]).tolist() == sorted(above)


def plain_walk(parents, tokens, valid, targets):
    """Level by level: all nodes that carry the target's token behind an accepted parent; the first of the deepest."""
    level, last = [0], [0]
    while level:
        last = level
        level = [node for node in range(1, len(parents))
                 if parents[node] in last and valid[node] and tokens[node] == targets[parents[node]]]
    return line(parents, last[0])


_walk = jax.jit(tree.walk)


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(trees(), min_size=2, max_size=2), data=st.data())
def test_the_walk_is_a_plain_walk(rows, data):
    def draw(values, width=SIZE):
        return np.asarray(data.draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=2, max_size=2)))

    small = st.integers(0, 1)                                             # so that siblings are often duplicates
    tokens, targets = draw(small), draw(small)
    valid = draw(st.sampled_from([True, True, True, False]))              # the root may be marked too: it always counts
    verdict = _walk(Draft(tokens, np.asarray(rows), valid, depth=SIZE - 1), targets)
    for b in range(2):
        path = plain_walk(rows[b], tokens[b].tolist(), valid[b].tolist(), targets[b].tolist())
        assert verdict.count[b] == len(path)
        assert verdict.path[b, :len(path)].tolist() == path
        assert verdict.node[b] == path[-1]
        assert verdict.next[b] == targets[b, path[-1]]
    np.testing.assert_array_equal(verdict.targets, targets)


def test_the_walk_passes_dead_ends_and_takes_the_first_of_two_equal_ends():
    #        0
    #   1(5)   2(5)   3(5, invalid)
    #   4(9)   5(7) 6(7)
    draft = Draft(jnp.asarray([[0, 5, 5, 5, 9, 7, 7]]), (0, 0, 0, 0, 1, 2, 2),
                  jnp.asarray([[True, True, True, False, True, True, True]]), depth=2)
    verdict = tree.walk(draft, jnp.asarray([[5, 7, 7, 7, 1, 2, 3]]))
    assert (verdict.path.tolist(), verdict.count.tolist(), verdict.next.tolist()) == ([[0, 2, 5]], [3], [2])
    nothing = tree.walk(draft, jnp.asarray([[4, 7, 7, 7, 1, 2, 3]]))
    assert (nothing.count.tolist(), nothing.node.tolist(), nothing.next.tolist()) == ([1], [0], [4])
