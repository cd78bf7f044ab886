"""Every tree policy, drafted by a real model, against plain brute force over the model's laws, path by path."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    DraftModel,
    Greedy,
    Sample,
    Shape,
    Speculative,
    check_settings,
    loop,
    make_decoder,
    spec,
    tree,
)
from parallax.decoding.base import Context
from parallax.decoding.growth import TREES
from parallax.decoding.growth.beam import condition
from parallax.decoding.sampling import noise_target, row_keys
from parallax.models import Block, Model
from parallax.testing import CHECKS, Case, MarkovModel, check_cache, p_value, tiny_config, tiny_model

SIZE, VOCAB = 24, 7
WARM = Sample(temperature=0.8, top_k=5)
DRAFT = dict(vocab_size=VOCAB, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
             scan_layers=False)
KINDS = {"deterministic": (Greedy(), "follow"), "coupled": (WARM, "follow"), "sampled": (WARM, "rejection")}
FIXED = ["levels(3, 2)", "paths(2, 3)", "delayed(1, 2, 2)", "sequoia(nodes=6, max_depth=3)",
         "static((0, 0), (1,), (0, 1))"]
RUNS = [(text, "deterministic") for text in [*FIXED, "confident(length=3)", "beam(3, 3, 8)"]]
RUNS += [("levels(3, 2)", "coupled"), ("levels(2, 2)", "sampled"), ("stochastic_beam(3, 3)", "sampled"),
         ("levels(widths=(2, 2), replacement=True)", "sampled")]


@pytest.fixture(scope="module")
def case():
    """A target and an unlike draft model that agrees with it now and then."""
    case = Case.tiny(vocab_size=VOCAB)
    _, draft = tiny_model(seed=1, **DRAFT)
    return dataclasses.replace(case, params={**case.params, "draft": draft}, new_tokens=10)


def decoder(case, text, kind="deterministic", **options):
    sampler, verifier = KINDS[kind]
    return make_decoder("draft_model", case.model, sampler=sampler, verifier=verifier,
                        draft=Model(tiny_config(**DRAFT)), tree=text, **options)


@jax.jit
def _step(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    draft, _ = decoder.drafter.propose(params["draft"], state.own, ctx)
    return draft, decoder.step(params, state)


@functools.cache
def _program(model):
    def logits(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(SIZE), tokens.shape)
        block = Block(tokens, positions, jnp.tril(jnp.ones((SIZE, SIZE), bool)))
        return model.unembed(params, model.forward(params, block, model.new_cache(tokens.shape[0], 0)).hidden)

    return jax.jit(logits)


def laws(model, params, texts):
    """Logits behind every text, each by itself."""
    padded = np.zeros((32, SIZE), np.int32)
    for i, text in enumerate(texts):
        padded[i, :len(text)] = text
    found = np.asarray(_program(model)(params, padded))
    return [found[i, len(text) - 1] for i, text in enumerate(texts)]


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), -1))


@pytest.mark.often("^(beam|stochastic|delayed|paths|confident)|coupled")
@pytest.mark.parametrize("text, kind", RUNS)
def test_every_node_is_what_the_model_alone_says_behind_its_path(text, kind, case):
    ours = decoder(case, text, kind)
    model, params, inputs = ours.drafter.model, case.params["draft"], case.inputs(ours)
    policy, state = ours.drafter.tree, loop.prefill(inputs, case.capacity)
    accepted = 0
    while not np.asarray(state.done).all():
        before = jax.tree.map(np.asarray, (state.tokens, state.length, state.done))
        draft, (after, info) = _step(inputs.decoder, inputs.params, state)
        assert draft.kind == kind and draft.depth == policy.depth and draft.tokens.shape[1] == 1 + policy.nodes
        for b in np.flatnonzero(~before[2]):
            _check(ours, draft, b, before[0][b, :before[1][b]].tolist(), case, model, params)
        check_cache(model, params, after.tokens, after.own.cache)
        assert (np.asarray(after.length) - np.asarray(after.own.cache.length) <= 2).all()
        accepted += int(info.accepted.sum())
        state = after
    assert accepted > 0
    if kind != "sampled":
        for row, end, wanted in zip(np.asarray(state.tokens), state.length, case.reference(KINDS[kind][0])):
            assert row[:end].tolist() == wanted


def _check(ours, draft, b, text, case, model, params):
    sampler, policy = ours.verifier.sampler, ours.drafter.tree
    tokens, valid = np.asarray(draft.tokens)[b].tolist(), np.asarray(draft.valid)[b]
    parents = np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[b].tolist()
    assert tokens[0] == text[-1] and all(parent < node or node == 0 for node, parent in enumerate(parents))
    assert all(valid[parents[node]] for node in np.flatnonzero(valid))
    paths = [text]
    for node in range(1, len(tokens)):
        paths.append(paths[parents[node]] + [tokens[node]])
    depths = tree.depths(np.asarray(parents), draft.depth)
    inner = [node for node in range(len(tokens)) if depths[node] < draft.depth and valid[node]]
    logits = dict(zip(inner, laws(model, params, [paths[node] for node in inner])))
    children = {node: [n for n in range(1, len(tokens)) if parents[n] == node and valid[n]] for node in inner}
    if draft.kind == "sampled":
        for node in (node for node in inner if children[node]):
            law = log_softmax(sampler.warp(jnp.asarray(logits[node])))
            np.testing.assert_allclose(np.asarray(draft.logq)[b, node], law, atol=2e-3, rtol=2e-3)
            drawn = [tokens[n] for n in children[node]]
            assert np.isfinite(law[drawn]).all() and (draft.replacement or len(set(drawn)) == len(drawn))
        assert draft.replacement == ("replacement=True" in str(ours.drafter.tree))
        return
    if isinstance(policy, TREES["beam"]):
        return _check_beam(policy, text, {tuple(paths[n]) for n in np.flatnonzero(valid)[1:]}, model, params)
    for node in inner:
        values = np.asarray(logits[node])
        if draft.kind == "coupled":
            values = np.asarray(WARM.warp(jnp.asarray(values))) + _noise(case, b, len(text) + depths[node])
        order = np.argsort(-values, kind="stable")
        wanted = order[[policy.shape.ranks[n] for n in range(1, len(tokens)) if parents[n] == node]].tolist()
        if isinstance(policy, TREES["confident"]):
            sure = np.exp(log_softmax(values).max())
            extra = next((n for bound, n in zip(policy.bands, policy.siblings) if sure < bound), 0)
            wanted = wanted[:1 + extra]
        assert [tokens[n] for n in children[node]] == wanted


def _noise(case, row, position):
    keys = row_keys(jax.random.key(case.seed), jnp.asarray([row]))
    return np.asarray(noise_target(keys, jnp.asarray([position]), VOCAB))[0]


def _check_beam(policy, text, kept, model, params):
    """Expand and rerank in plain Python."""
    level, every = [((), 0.0)], []
    for _ in range(policy.depth):
        found = []
        for (path, total), logits in zip(level, laws(model, params, [text + list(path) for path, _ in level])):
            law = log_softmax(logits)
            found += [((*path, int(token)), total + law[token]) for token in np.argsort(-law)[:policy.width]]
        every += found
        level = sorted(found, key=lambda entry: -entry[1])[:policy.width]
    best = sorted(every, key=lambda entry: -entry[1])
    assert kept == {(*text, *path) for path, _ in best[:policy.nodes]}


@pytest.mark.often("limits|batch_independence-beam")
@pytest.mark.parametrize("text, kind", [("beam(3, 3, 8)", "deterministic"), ("levels(3, 2)", "coupled"),
                                        ("stochastic_beam(3, 3)", "sampled")])
@pytest.mark.parametrize("check", ["batch_independence", "no_recompilation", "limits"])
def test_holds_for_trees(text, kind, check, case):
    CHECKS[check](decoder(case, text, kind), case)


TABLE = np.asarray([[1.0, 0.2, -0.5, 0.1], [0.0, 1.1, 0.4, -0.3], [0.6, -0.4, 0.9, 0.0], [-0.2, 0.5, 0.3, 0.8]])
DRAWS = 20000


def drafts(text):
    """Many drafts of a table of laws behind token 0."""
    model, params = MarkovModel.create(TABLE)
    drafter = DraftModel(model=model, sampler=Sample(), kind="sampled", tree=text)
    decoder = Speculative(model=model, drafter=drafter)
    inputs = loop.cast(decoder, {"target": params, "draft": params}, [[0]], [1], None, 0, [4], capacity=4)

    def one(row):
        state = loop.prefill(inputs._replace(row_ids=row[None]), 4)
        ctx = Context(model, params, state.tokens, state.length, state.cache, state.key)
        draft = drafter.propose(params, state.own, ctx)[0]
        return draft.tokens[0], jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)[0]

    tokens, parents = jax.jit(jax.vmap(one))(jnp.arange(DRAWS))
    return np.asarray(tokens), np.asarray(parents)


LAW = np.exp(log_softmax(TABLE))


def pairs(first, second, laws):
    """p-value of two tokens drawn one after the other, where laws[i, j] is the probability of (i, j)."""
    return p_value(np.stack([first, second], 1), laws.reshape(-1))


WITHOUT = LAW[0][:, None] * np.where(np.eye(4), 0, LAW[0][None]) / (1 - LAW[0])[:, None]


def test_siblings_are_drawn_without_replacement_in_order_and_their_children_by_their_own_law():
    tokens, _ = drafts("levels(2, 2)")                                    # 0; 1, 2; 3, 4 behind 1; 5, 6 behind 2
    assert pairs(tokens[:, 1], tokens[:, 2], WITHOUT) > 1e-5
    assert pairs(tokens[:, 1], tokens[:, 3], LAW[0][:, None] * LAW) > 1e-5
    second = WITHOUT.sum(0)
    assert pairs(tokens[:, 2], tokens[:, 5], second[:, None] * LAW) > 1e-5
    assert (tokens[:, 3] != tokens[:, 4]).all() and (tokens[:, 5] != tokens[:, 6]).all()


@pytest.mark.parametrize("text", ["levels(widths=(2, 1), replacement=True)", "paths(2, 2)"])
def test_siblings_are_drawn_independently_with_replacement(text):
    tokens, _ = drafts(text)                                                # 0; 1, 2; 3 behind 1; 4 behind 2
    assert pairs(tokens[:, 1], tokens[:, 2], np.outer(LAW[0], LAW[0])) > 1e-5
    assert pairs(tokens[:, 2], tokens[:, 4], LAW[0][:, None] * LAW) > 1e-5
    assert pairs(tokens[:, 2], tokens[:, 3], np.outer(LAW[0], LAW[0] @ LAW)) > 1e-5      # no level shares any noise
    alike = tokens[tokens[:, 1] == tokens[:, 2]]
    assert 0 < (alike[:, 3] == alike[:, 4]).mean() < 0.5                  # also below equal tokens


def test_a_stochastic_beam_samples_whole_paths_without_replacement_best_first():
    tokens, parents = drafts("stochastic_beam(2, 2)")                     # 0; 1, 2; 3, 4 anywhere
    assert pairs(tokens[:, 1], tokens[:, 2], WITHOUT) > 1e-5
    above = np.take_along_axis(tokens, parents, 1)
    paths = LAW[0][:, None] * LAW                                          # the law of a path of two
    assert pairs(above[:, 3], tokens[:, 3], paths) > 1e-5                  # the best one is a draw from it
    flat = paths.reshape(-1)
    both = flat[:, None] * np.where(np.eye(16), 0, flat[None]) / (1 - flat)[:, None]
    index = 4 * above + tokens
    assert (index[:, 3] != index[:, 4]).all()
    # Truncation at two paths per level is by perturbed score, so that the second is a draw from what the first left.
    assert p_value(index[:, 3:5], both.reshape(-1)) > 1e-5
    assert np.unique(parents[:, 3:], axis=0).tolist() == [[1, 1], [1, 2]]  # the best one has the best one's child


def test_conditioned_gumbel_values_have_the_given_maximum_and_keep_their_order():
    values = jnp.asarray([3.0, 1.0, -2.0, -jnp.inf])
    moved = np.asarray(condition(jnp.asarray(0.5), values[0], values))
    assert moved[0] == 0.5 and moved[3] == -np.inf and (np.diff(moved) < 0).all()
    wanted = -np.log(np.exp(-0.5) - np.exp(-3.0) + np.exp(-np.asarray(values[:3])))
    np.testing.assert_allclose(moved[:3], wanted, rtol=1e-5)


@pytest.mark.parametrize("logits", [np.where(np.eye(4, k=1) + np.eye(4, k=-3) > 0, 500.0, 0.0), np.zeros((4, 4))])
def test_a_reranked_beam_is_a_tree_where_probabilities_are_equal_or_one(logits):
    model, params = MarkovModel.create(logits)
    for nodes in (1, 4, 9):
        drafter = DraftModel(model=model, tree=f"beam(3, 4, {nodes})")
        state = loop.prefill(loop.cast(Speculative(model=model, drafter=drafter), {"target": params, "draft": params},
                                       [[0]], [1], None, 0, [9], capacity=9), 9)
        ctx = Context(model, params, state.tokens, state.length, state.cache, state.key)
        draft = jax.jit(lambda params, own, ctx: drafter.propose(params, own, ctx._replace(model=model))[0])(
            params, state.own, ctx._replace(model=None))
        parents, depth = np.asarray(draft.parents)[0], tree.depths(np.asarray(draft.parents)[0], 4)
        assert (parents[1:] < np.arange(1, nodes + 1)).all() and (np.diff(depth) >= 0).all()
        assert (depth[1:] == depth[parents[1:]] + 1).all() and depth.max() <= 4
        if logits.any() and nodes == 4:                                    # the certain path, as far as it goes
            assert np.asarray(draft.tokens)[0].tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("text, parents", [
    ("chain(3)", (0, 0, 1, 2)),
    ("levels(2, 1, 2)", (0, 0, 0, 1, 2, 3, 3, 4, 4)),
    ("paths(2, 3)", (0, 0, 0, 1, 2, 3, 4)),
    ("delayed(2, 2, 2)", (0, 0, 1, 2, 2, 3, 4)),
    ("static((0, 0), (1,), (0, 1))", (0, 0, 0, 1, 1)),
    ("sequoia(nodes=3, max_depth=3, acceptance=(0.9, 0.05))", (0, 0, 1, 2)),
    ("sequoia(nodes=3, max_depth=3, acceptance=((0.9, 0.8, 0.7), (0.1,)))", (0, 0, 0, 0)),
    ("sequoia(nodes=2, max_depth=1, acceptance=(0.1, 0.2, 0.3))", (0, 0, 0)),
    ("confident(length=2, bands=(0.5,), siblings=(2,))", (0, 0, 0, 0, 1, 1, 1)),
])
def test_static_trees_have_their_shapes(text, parents):
    policy = spec.build(text, TREES, "tree")
    assert policy.shape.parents == parents and policy.nodes == len(parents) - 1
    assert policy.depth == policy.shape.depth and max(policy.shape.ranks) < max(policy.first, policy.rest)


def test_an_optimal_shape_by_depth_and_rank_beats_all_others():
    acceptance, depth = ((0.5, 0.3), (0.9, 0.2)), 3
    every = [tuple(map(int, f"{i:0{d}b}")) for d in range(1, depth + 1) for i in range(2 ** d)]

    def worth(paths):
        return sum(np.prod([acceptance[min(d, 1)][rank] for d, rank in enumerate(path)]) for path in paths)

    for nodes in range(1, 7):
        shape = Shape.best_first(nodes, depth, acceptance)
        paths = [()]
        for parent, rank in zip(shape.parents[1:], shape.ranks[1:]):
            paths.append((*paths[parent], rank))
        best = max(worth(chosen) for chosen in itertools.combinations(every, nodes)
                   if all(len(path) == 1 or path[:-1] in chosen for path in chosen))
        assert worth(paths[1:]) == pytest.approx(best)


@pytest.mark.parametrize("text, message", [
    ("chain(0)", "length must be at least 1, got 0"),
    ("levels(2, 0)", r"widths must be at least 1 child in at least one level, got \(2, 0\)"),
    ("levels(2, 1.5)", r"widths must be at least 1 child in at least one level, got \(2, 1.5\)"),
    ("levels(50, 50)", r"levels\(50, 50\) has 2550 nodes: expected at most 1024"),
    ("paths(0, 3)", "count must be at least 1, got 0"),
    ("delayed(trunk=0)", "trunk must be at least 1, got 0"),
    ("static((0,), (2,))", "siblings must have the ranks 0, 1, ... without a gap"),
    ("static(0, 1)", r"paths must be ranks from 0 down to each node.*got \(0, 1\)"),
    ("sequoia(nodes=0)", "nodes must be at least 1"),
    ("sequoia(nodes=9, max_depth=1)", "only 4 nodes of 1 levels and 4 ranks, got nodes=9"),
    ("sequoia(acceptance=(0.5, 1.5))", "probabilities by rank"),
    ("sequoia(acceptance=((0.5,), 0.2))", "probabilities by rank"),
    ("confident(siblings=(1, 2))", "equally many"),
    ("confident(siblings=('a', 1, 2))", "whole numbers from 0"),
    ("confident(bands=('a', 0.5, 0.7))", "must be rising"),
    ("confident(bands=(0.8, 0.3, 0.1))", "must be rising"),
    ("beam(width=2, depth=2, nodes=7)", "width 2 and depth 2 has 6 nodes to keep, got nodes=7"),
    ("beam(width=0)", "width must be at least 1, got 0"),
    ("bean(3)", "unknown tree 'bean'.*did you mean 'beam'"),
    ("beam(wide=3)", "has no option 'wide'"),
    ("beam(width=3, width=4)", "expected a tree as name or name"),
    (f"chain({'-' * 3000}1)", "expected a tree as name or name"),
])
def test_bad_trees_are_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        check_settings("draft_model", {"tree": text}, draft=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text, sampler, verifier, message", [
    ("beam(3, 3, 8)", WARM, "rejection", "tree 'beam' makes deterministic drafts, not sampled ones: .* with follow"),
    ("confident()", WARM, "rejection", "tree 'confident' makes deterministic drafts"),
    ("stochastic_beam(2, 2)", Greedy(), "follow", "makes sampled drafts, not deterministic ones: set a temperature"),
    ("levels(8)", Greedy(), "follow", "tree 'levels' draws 8 different tokens behind one, and the vocabulary has 7"),
])
def test_trees_that_do_not_fit_their_verifier_or_model_are_refused(text, sampler, verifier, message, case):
    with pytest.raises(ValueError, match=message):
        make_decoder("draft_model", case.model, sampler=sampler, verifier=verifier, draft=Model(tiny_config(**DRAFT)),
                     tree=text)


def test_the_length_of_a_chain_and_another_tree_are_not_both_given(case):
    with pytest.raises(ValueError, match="draft_length=3 beside it, leave one of them out"):
        check_settings("draft_model", {"tree": "levels(2, 2)", "draft_length": 3}, draft=True)
    ours = decoder(case, "levels(2, 2)").drafter
    assert ours.draft_length == ours.depth == 2
    assert decoder(case, "", draft_length=6).drafter.tree == TREES["chain"](length=6)
