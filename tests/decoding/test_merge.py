"""United, grafted and pruned trees, against their paths of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, Shape
from parallax.decoding.merge import graft, merge, prune

BATCH, VOCAB = 16, 3               # few tokens, so that many siblings are the same


def random_draft(seed, size, depth=3, **fields):
    """A tree of its own per sequence, with invalid nodes and siblings with the same token."""
    draw = np.random.default_rng(seed)
    parents = np.zeros((BATCH, size), np.int32)
    level = np.zeros((BATCH, size), np.int32)
    for b in range(BATCH):
        for n in range(1, size):
            parents[b, n] = draw.choice([m for m in range(n) if level[b, m] < depth])
            level[b, n] = level[b, parents[b, n]] + 1
    tokens = draw.integers(0, VOCAB, (BATCH, size))
    tokens[:, 0] = np.arange(BATCH) % VOCAB
    valid = draw.random((BATCH, size)) < 0.8
    valid[:, 0] = True
    return Draft(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(valid), depth=depth, **fields)


def reached(draft, b):
    """The valid nodes whose ancestors are valid too, in order."""
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)[b]
    valid, found = np.asarray(draft.valid[b]), [0]
    for n in range(1, len(valid)):
        if valid[n] and parents[n] in found:
            found.append(n)
    return found


def paths_of(draft):
    """The tokens from the root to every such node."""
    parents, result = np.broadcast_to(draft.parents, draft.tokens.shape), []
    for b in range(len(parents)):
        path = {0: ()}
        for n in reached(draft, b)[1:]:
            path[n] = (*path[int(parents[b, n])], int(draft.tokens[b, n]))
        result.append(list(path.values()))
    return result


def in_order(draft):
    """Parents stand before their children; every path that is there is there once."""
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)
    assert (parents[:, 1:] < np.arange(1, parents.shape[1])).all() and (parents[:, 0] == 0).all()
    found = paths_of(draft)
    for b, row in enumerate(found):
        assert len(set(row)) == len(row) == np.asarray(draft.valid)[b].sum(), f"row {b} has a path twice"
        assert max(map(len, row)) <= draft.depth
    return [set(row) for row in found]


@pytest.mark.parametrize("sizes", [(9, 7), (1, 6), (6, 1), (12, 12)])
def test_a_union_has_the_paths_of_both_parts_once_each_and_no_other(sizes):
    a, b = random_draft(0, sizes[0]), random_draft(1, sizes[1])
    united = jax.jit(merge)(a, b)
    assert united.tokens.shape == (BATCH, sum(sizes) - 1) and united.depth == 3 and united.kind == "deterministic"
    assert in_order(united) == [set(x) | set(y) for x, y in zip(paths_of(a), paths_of(b))]
    if sizes == (12, 12):                                                # what the part had twice is there once too
        assert any(len(set(x)) < len(x) for x in paths_of(a))


def test_a_union_of_chains_that_begin_alike_shares_their_beginning():
    a = Draft(jnp.array([[5, 1, 2, 3]]), Shape.chain(3).parents, jnp.ones((1, 4), bool), depth=3, forwards=3, rows=4)
    b = Draft(jnp.array([[5, 1, 2, 9, 8]]), Shape.chain(4).parents, jnp.ones((1, 5), bool), depth=4, kind="coupled")
    united = merge(a, b)
    assert united.parents.tolist() == [[0, 0, 1, 2, 0, 1, 2, 6]]
    assert united.valid.tolist() == [[True, True, True, True, False, False, True, True]]
    assert (united.depth, united.kind, united.forwards, united.rows) == (4, "coupled", 3, 4)


def test_branches_hang_under_their_nodes_and_merge_with_what_is_there():
    base = random_draft(2, 8, depth=2, kind="sampled", logq=jnp.zeros((BATCH, 1, VOCAB)))
    draw = np.random.default_rng(3)
    onto, tokens = draw.integers(0, 8, (BATCH, 3)), draw.integers(0, VOCAB, (BATCH, 3, 2))
    valid = draw.random((BATCH, 3, 2)) < 0.8
    grown = jax.jit(graft)(base, jnp.asarray(onto), jnp.asarray(tokens), jnp.asarray(valid))
    assert grown.tokens.shape == (BATCH, 8 + 6) and grown.depth == 4
    assert grown.kind == "deterministic" and grown.logq is None
    expected = []
    for b, row in enumerate(paths_of(base)):
        stood = dict(zip(reached(base, b), row))
        expected.append(set(row))
        for node, branch, kept in zip(onto[b], tokens[b], valid[b]):
            for end in range(1, 3):
                if node in stood and kept[:end].all():
                    expected[b].add(stood[node] + tuple(branch[:end].tolist()))
    assert in_order(grown) == expected


def test_a_branch_of_nothing_leaves_the_tree_as_it_was():
    base = prune(random_draft(4, 8), jnp.zeros((BATCH, 8)), 5)[0]
    nothing = jnp.zeros((BATCH, 2, 2), bool)
    grown = graft(base, jnp.zeros((BATCH, 2), int), jnp.zeros((BATCH, 2, 2), int), nothing)
    assert in_order(grown) == [set(row) for row in paths_of(base)]


@pytest.mark.parametrize("nodes", [1, 4, 9, 20])
def test_pruning_keeps_the_best_nodes_and_all_above_them(nodes):
    draft = random_draft(5, 10)
    scores = jnp.asarray(np.random.default_rng(6).integers(0, 4, (BATCH, 10)), jnp.float32)         # with many ties
    pruned, kept = jax.jit(prune, static_argnums=2)(draft, scores, nodes)
    size = min(nodes + 1, 10)
    assert pruned.tokens.shape == kept.shape == (BATCH, size)
    for b in range(BATCH):
        parents, old = np.asarray(draft.parents[b]), np.asarray(kept[b])
        least = np.where(draft.valid[b], scores[b], -np.inf)
        least[0] = np.inf
        for n in range(1, 10):
            least[n] = min(least[n], least[parents[n]])
        wanted = np.sort(sorted(range(10), key=lambda n: (-least[n], n))[:size])
        assert old.tolist() == wanted.tolist()
        assert old[np.asarray(pruned.parents[b])].tolist() == parents[old].tolist()
        assert (pruned.tokens[b] == draft.tokens[b][old]).all() and (pruned.valid[b] == draft.valid[b][old]).all()

