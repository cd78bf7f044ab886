"""The rules for drawn drafts: their laws by exact enumeration, who accepts more, whole texts through the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, Follow, Greedy, Sample, Shape, Speculative
from parallax.decoding.verify import VERIFIERS, Block, KSeq, MultiPath, Rejection, Traversal
from parallax.decoding.verify.multipath import mass_upto, rank
from parallax.testing import (
    CHECKS,
    Case,
    MarkovModel,
    SampledDrafter,
    Source,
    Tables,
    enumerate_law,
    markov_law,
    p_value,
    random_tables,
    sample_many,
)

SAMPLER = Sample()
EXACT = ("rejection", "kseq", "block", "traversal", "multipath")
SHAPES = {"chain": Shape.chain(2), **{name: Shape.levels(widths) for name, widths in
                                      {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2), "4": (4,)}.items()}}
BOTH = [("chain", False), ("2x1", True), ("1x2", True), ("2x2", True)]
TAKES = {                                                        # (shape, whether siblings are drawn with replacement)
    "rejection": [*BOTH, ("2x1", False), ("1x2", False), ("2x2", False), ("4", False)],
    "kseq": BOTH,
    "block": BOTH[:1],
    "traversal": [*BOTH, ("2x1", False), ("1x2", False), ("2x2", False), ("4", False)],
    "multipath": BOTH[:2],
}


def rule(name, **options):
    return VERIFIERS[name](sampler=SAMPLER, **options)


@functools.cache
def law(name, shape, replacement, count):
    return enumerate_law(rule(name), Source(SHAPES[shape], replacement), random_tables(count=count))


def accepted(name, shape, replacement=False):
    return law(name, shape, replacement, 4 if shape == "2x2" else 24).accepted.mean()


@pytest.mark.parametrize("name, shape, replacement", [(name, *source) for name in EXACT for source in TAKES[name]])
def test_the_law_is_the_targets(name, shape, replacement):
    assert law(name, shape, replacement, 4 if shape == "2x2" else 24).tv.max() < 1e-9


@pytest.mark.parametrize("replacement", [False, True])
def test_following_is_exact_for_drawn_drafts_too_and_equal_siblings_get_one_try(replacement):
    for shape in ("2x1", "1x2"):
        found = enumerate_law(Follow(sampler=SAMPLER), Source(SHAPES[shape], replacement), random_tables(count=6))
        assert found.tv.max() < 1e-9


def test_judging_together_accepts_more_than_judging_token_by_token():
    assert accepted("block", "chain") > accepted("rejection", "chain") + 0.01
    for shape, replacement in (("2x1", False), ("2x1", True), ("1x2", True), ("2x2", False)):
        assert accepted("traversal", shape, replacement) > accepted("rejection", shape, replacement)
    assert accepted("kseq", "2x1", True) > accepted("rejection", "2x1", True)
    assert accepted("multipath", "2x1", True) > accepted("traversal", "2x1", True) > accepted("block", "chain")


@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_siblings_without_replacement_are_accepted_more_often(name):
    for shape in ("2x1", "1x2"):
        assert accepted(name, shape, False) > accepted(name, shape, True) + 0.01


def test_rules_that_agree_on_a_chain_are_the_same_there():
    for same in (("block", "traversal", "multipath"), ("rejection", "kseq")):
        first, *others = (law(name, "chain", False, 24) for name in same)
        for other in others:
            np.testing.assert_allclose(first.accepted, other.accepted, atol=1e-9)


def lacking(name, shape, replacement, dropped):
    """How far the law is off where some nodes are missing."""
    kept = [node not in dropped for node in range(len(SHAPES[shape].parents))]
    source = Source(SHAPES[shape], replacement, valid=lambda chances: jnp.asarray(kept))
    return enumerate_law(rule(name), source, random_tables(count=3)).tv.max()


@pytest.mark.often("block|2x1")
@pytest.mark.parametrize("name, shape, replacement, missing", [
    ("block", "chain", False, [(2,), (1,)]), ("traversal", "chain", False, [(2,), (1, 2)]),
    ("rejection", "2x1", False, [(2,), (2, 3)]), ("rejection", "2x1", True, [(1, 4)]),
    ("kseq", "2x1", True, [(1, 4), (3,)]), ("kseq", "1x2", True, [(2,)]),
    ("traversal", "2x1", True, [(1,), (3,)]), ("traversal", "1x2", False, [(3,), (1,)])])
def test_nodes_may_be_missing(name, shape, replacement, missing):
    for dropped in missing:
        assert lacking(name, shape, replacement, dropped) < 1e-9


@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_of_siblings_without_replacement_only_the_last_may_be_missing(name):
    assert lacking(name, "2x1", False, (1,)) > 0.02              # the second was drawn where the first was taken out


@pytest.mark.parametrize("kept", [(0, 1, 2), (0, 1, 3), (0, 2, 4), (0,)])
def test_paths_may_be_missing_or_all_of_them_shorter(kept):
    source = Source(SHAPES["2x1"], True, valid=lambda chances: jnp.isin(jnp.arange(5), jnp.asarray(kept)))
    found = enumerate_law(rule("multipath"), source, random_tables(count=6))
    assert found.tv.max() < 1e-9
    if kept in ((0, 1, 3), (0, 2, 4)):                           # one path is left, and then this is block verification
        np.testing.assert_allclose(found.accepted, law("block", "chain", False, 24).accepted[:6], atol=1e-9)


@pytest.mark.parametrize("name, shape", [("block", "chain"), ("rejection", "chain"), ("traversal", "2x1"),
                                         ("multipath", "2x1")])
def test_drafting_may_stop_behind_an_unlikely_token_that_is_kept(name, shape):
    tree = SHAPES[shape]
    weak = Source(tree, True, valid=lambda chances: chances[:, jnp.asarray(tree.parents)] >= 0.4)
    assert enumerate_law(rule(name), weak, random_tables(count=6)).tv.max() < 1e-9


@pytest.mark.parametrize("name", ["rejection", "kseq", "block", "traversal"])
def test_a_draft_from_the_targets_own_law_is_accepted_as_a_whole(name):
    tables = random_tables(count=6)
    for shape, replacement in TAKES[name][:2]:
        found = enumerate_law(rule(name), Source(SHAPES[shape], replacement), Tables(tables.p, tables.p[:2]))
        np.testing.assert_allclose(found.accepted, 2, atol=1e-9)
        assert found.tv.max() < 1e-9


def test_more_rho_is_exact_but_accepts_less():
    tables = random_tables(count=6)
    best, two, huge = (enumerate_law(rule("kseq", rho=rho), Source(Shape.levels((2,)), True), tables)
                       for rho in (1, 2, 50))
    assert max(found.tv.max() for found in (best, two, huge)) < 1e-9
    assert best.accepted.mean() > two.accepted.mean() > huge.accepted.mean()


# Without tables of their own: laws of 500 tokens, float32.

WIDE, TREE = 500, Shape.levels((3, 2, 1))
PATHS = Shape.levels((3, 1, 1))


def draft_of(shape, batch=6, seed=0, replacement=True):
    """(a draft whose laws have many zeros, a target's laws that have others)."""
    random = np.random.default_rng(seed)
    size = len(shape.parents)
    logits = random.normal(0, 3, (batch, size, WIDE)) + random.normal(0, 0.7, (2, batch, size, WIDE))
    logits = np.where(logits < np.sort(logits, -1)[..., -40:-39], -np.inf, logits)
    logits[1, 0] = logits[0, 0]                                  # the first sequence drafts by the target's law
    q, p = np.exp(jax.nn.log_softmax(logits, -1))
    tokens = np.zeros((batch, size), int)
    for b in range(batch):
        for node in range(1, size):
            tokens[b, node] = random.choice(WIDE, p=np.float64(q[b, shape.parents[node]])
                                            / q[b, shape.parents[node]].sum(dtype=np.float64))
    with np.errstate(divide="ignore"):
        draft = Draft(jnp.asarray(tokens), shape.parents, jnp.ones((batch, size), bool), depth=shape.depth,
                      kind="sampled", logq=jnp.asarray(np.log(q[:, :1 + max(shape.parents)])), replacement=replacement)
        return draft, jnp.asarray(np.log(p)), jnp.asarray(random.random((batch, size)), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _judge(name, parents, draft, logp, uniform):
    return rule(name).judge(draft if parents is None else draft.replace(parents=parents), logp, uniform)


def judged(name, draft, logp, uniform):
    """As in the loop, where a static tree is a tuple of whole numbers."""
    known = draft.parents if isinstance(draft.parents, tuple) else None
    return _judge(name, known, draft if known is None else draft.replace(parents=()), logp, uniform)


@pytest.mark.parametrize("name, shape, replacement", [
    ("rejection", TREE, False), ("rejection", TREE, True), ("kseq", TREE, True), ("traversal", TREE, False),
    ("traversal", TREE, True), ("block", Shape.chain(6), False), ("multipath", PATHS, True)])
def test_float32_computes_numbers_where_laws_have_zeros(name, shape, replacement):
    for seed in range(3):
        node, weights, chances = judged(name, *draft_of(shape, seed=seed, replacement=replacement))
        assert np.isfinite(weights).all() and (weights >= 0).all() and (weights.sum(-1) > 0).all()
        assert np.isfinite(chances).all() and (chances >= 0).all() and (chances <= 1 + 1e-6).all()
        assert ((0 <= node) & (node < len(shape.parents))).all()
        if name != "multipath":
            assert node[0] > 0                                   # of equal laws something is kept


@pytest.mark.parametrize("name", ["rejection", "kseq", "traversal"])
def test_trees_that_only_the_running_program_knows_are_judged_the_same(name):
    draft, logp, uniform = draft_of(TREE)
    parents = jnp.broadcast_to(jnp.asarray(TREE.parents), draft.tokens.shape)
    known, found = (judged(name, d, logp, uniform) for d in (draft, draft.replace(parents=parents)))
    for ours, theirs in zip(known, found):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert len(set(np.asarray(known.node).tolist())) > 2         # the sequences ended at different nodes


def test_a_tree_per_sequence_is_judged_as_alone():
    other = Shape((0, 0, 1, 2, 1, 0, 5, 6, 5, 0, 9, 10, 9, 0, 13, 14), (0,) * 16)
    assert len(other.parents) == len(TREE.parents)
    drafts = [draft_of(shape, batch=1, seed=7) for shape in (TREE, other)]
    both = Draft(jnp.concatenate([d.tokens for d, _, _ in drafts]), jnp.asarray([TREE.parents, other.parents]),
                 jnp.ones((2, 16), bool), depth=3, kind="sampled", replacement=True,
                 logq=jnp.concatenate([jnp.pad(d.logq, ((0, 0), (0, 16 - d.logq.shape[1]), (0, 0)))
                                       for d, _, _ in drafts]))
    logp, uniform = (jnp.concatenate([d[i] for d in drafts]) for i in (1, 2))
    for name in ("rejection", "traversal"):
        together = judged(name, both, logp, uniform)
        for i, (draft, logp_, uniform_) in enumerate(drafts):
            for ours, theirs in zip(judged(name, draft, logp_, uniform_), together):
                np.testing.assert_allclose(ours[0], theirs[i], rtol=1e-5, atol=1e-7)


def test_the_mass_in_front_of_a_token_is_that_of_a_full_sort():
    random = np.random.default_rng(0)
    logp, logq = (np.log(random.dirichlet(np.full(1500, 0.05), 2) + 1e-9).astype(np.float32) for _ in range(2))
    found, order = np.asarray(mass_upto(logp, logq)), np.asarray(rank(logp, logq))
    assert 20 < np.isfinite(order[0]).sum() < 512                # some are sorted, most come before or behind them
    for row in range(2):
        place = np.lexsort((np.arange(1500), order[row]))
        np.testing.assert_allclose(found[row][place], np.cumsum(np.exp(logq[row][place])), atol=1e-5)


# Whole texts through the compiled loop. A chi-square with p below 1e-6 is no accident, and the seeds are fixed.

TABLE = np.asarray([[0.3, 1.1, 0.0], [0.9, -0.2, 0.4], [0.1, 0.2, 1.2]], np.float32)
GUESS = np.asarray([[1.2, 0.1, 0.3], [0.5, 0.6, -0.9], [1.0, -0.4, 0.2]], np.float32)
MODEL, TARGET = MarkovModel.create(TABLE)
DRAWS, NEW, PROMPT = 4000, 3, [0, 1, 2, 0]
P = np.asarray(jax.nn.softmax(TABLE, -1))


@pytest.mark.often("rejection|block|traversal-2x2|multipath")
@pytest.mark.parametrize("name, shape, replacement", [
    ("rejection", "2x2", False), ("kseq", "2x2", True), ("block", "chain", False), ("traversal", "2x2", False),
    ("traversal", "1x2", True), ("multipath", "2x1", True)])
def test_texts_have_the_law_of_plain_sampling(name, shape, replacement):
    ours = Speculative(model=MODEL, drafter=SampledDrafter(shape=SHAPES[shape], replacement=replacement),
                       verifier=rule(name))
    texts = sample_many(ours, {"target": TARGET, "draft": jnp.asarray(GUESS)}, PROMPT, NEW, DRAWS)
    assert p_value(texts, markov_law(P, PROMPT[-1], NEW)) > 1e-6


@pytest.mark.parametrize("check", ["every_step", "batch_independence"])
def test_a_tree_and_its_rule_keep_the_invariants(check):
    case = Case.tiny()
    params = {**case.params, "draft": jax.random.normal(jax.random.key(1), (61, 61)) * 3}
    drafter = SampledDrafter(shape=SHAPES["2x2"])
    case = Case(case.model, params, case.prompts, new_tokens=12)
    CHECKS[check](Speculative(model=case.model, drafter=drafter, verifier=rule("traversal")), case)


# What a rule cannot verify.

def draft_like(shape, replacement=False, logq=True):
    nodes = len(shape.parents)
    return Draft(jnp.zeros((1, nodes), int), shape.parents, jnp.ones((1, nodes), bool), depth=shape.depth,
                 kind="sampled", replacement=replacement, logq=jnp.zeros((1, nodes, 3)) if logq else None)


@pytest.mark.parametrize("which, draft, message", [
    (Block, draft_like(SHAPES["2x1"]), "Block verifies chains, this draft is a tree: use a chain, or Traversal"),
    (KSeq, draft_like(SHAPES["2x1"]), "these were drawn without: draw the tree with replacement=True, or use"),
    (MultiPath, draft_like(SHAPES["2x1"]), "these were drawn without: draw the tree with replacement=True"),
    (MultiPath, draft_like(SHAPES["1x2"], True), "paths of equal length that meet only in the root: draw a tree of"),
    (Traversal, draft_like(SHAPES["2x1"], logq=False), "no logq .q missing."),
    (Rejection, Draft(jnp.zeros((1, 2), int), (0, 0), jnp.ones((1, 2), bool), depth=1),
     "Rejection cannot verify a deterministic draft: it takes sampled"),
])
def test_a_draft_that_a_rule_cannot_verify_is_refused(which, draft, message):
    with pytest.raises(ValueError, match=message) as error:
        which(sampler=SAMPLER).check(draft)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", EXACT)
def test_temperature_zero_is_refused(name):
    with pytest.raises(ValueError, match="needs a temperature above 0: at temperature 0 use Follow"):
        VERIFIERS[name](sampler=Greedy()).check(SampledDrafter(shape=SHAPES["2x1"]))


@pytest.mark.parametrize("rho", [0.5, -1, float("nan")])
def test_a_rho_that_is_not_exact_is_refused(rho):
    with pytest.raises(ValueError, match="rho must be 0 .the best one. or at least 1"):
        rule("kseq", rho=rho)


def test_enumeration_refuses_tables_that_are_too_short():
    with pytest.raises(ValueError, match="the tables reach 1 tokens deep, expected at least 2"):
        enumerate_law(rule("rejection"), SHAPES["chain"], random_tables(depth=1))
