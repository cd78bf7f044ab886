"""Lossy rules against numpy, and where they are the exact rule that they relax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, Greedy, Rejection, Sample, Shape, Speculative, loop, make_decoder, spec
from parallax.decoding.base import Context
from parallax.decoding.sampling import row_keys
from parallax.decoding.verify import VERIFIERS, Dropout, EntropyAware, MinBlock, Relaxed, Typical
from parallax.testing import Case, MarkovModel, OracleDrafter, invariants
from parallax.testing.enumerate import enumerate_law, levels, random_tables

LOSSY = ["typical", "top_k", "distance", "min_block", "relaxed", "entropy_aware", "dropout"]
SIZE, SEQUENCES = 6, 40
TREE = Shape.paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 0, 0), (0, 1, 0)])
SAMPLERS = {"greedy": Greedy(), "sampled": Sample(temperature=0.7, top_k=4)}
MODEL, TABLE = MarkovModel.create(np.random.default_rng(3).normal(size=(SIZE, SIZE)) * 1.5)


def drafts(shape=TREE, seed=0):
    """Random trees over the Markov target, some of their nodes missing."""
    random = np.random.default_rng(seed)
    size = len(shape.parents)
    valid = random.random((SEQUENCES, size)) < 0.9
    valid[:, 0] = True
    return Draft(jnp.asarray(random.integers(0, SIZE, (SEQUENCES, size)), jnp.int32), shape.parents,
                 jnp.asarray(valid), depth=shape.depth)


@functools.partial(jax.jit, static_argnames="parents")
def _verdict(verifier, draft, parents):
    """Of a target whose logits depend on the node's token alone."""
    draft = draft.replace(parents=parents)
    logits = TABLE["table"][draft.tokens]
    length = jnp.arange(SEQUENCES) + 5
    ctx = Context(MODEL, TABLE, jnp.zeros((SEQUENCES, 60), jnp.int32), length, None,
                  row_keys(jax.random.key(1), jnp.arange(SEQUENCES)))
    return verifier(draft, logits, logits, ctx)


def verdict(verifier, draft):
    numbers = jax.tree.map(jnp.asarray, verifier)
    return jax.tree.map(np.asarray, _verdict(numbers, draft.replace(parents=None), draft.parents))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def warped(row, sampler):
    """The law behind a token in numpy; certain at temperature 0."""
    if isinstance(sampler, Greedy):
        return np.eye(SIZE)[row.argmax()]
    return softmax(np.where(row >= np.sort(row)[-sampler.top_k], row, -np.inf) / sampler.temperature)


def typical(row, token, sampler, epsilon, delta):
    p = warped(row, sampler)
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    return p[token] > min(epsilon, delta * np.exp(-entropy))


def near_best(row, token, sampler, beta, tau):
    return (row > row[token]).sum() < beta and np.log(softmax(row)).max() - np.log(softmax(row))[token] <= tau


ORACLES = {
    "typical(epsilon=0.2, delta=0.5)": lambda row, token, sampler: typical(row, token, sampler, 0.2, 0.5),
    "typical": lambda row, token, sampler: typical(row, token, sampler, 0.09, 0.3),
    "top_k(3)": lambda row, token, sampler: token in np.argsort(-row)[:3],
    "distance(1)": lambda row, token, sampler: abs(token - row.argmax()) <= 1,
    "relaxed(beta=4, tau=1.5)": lambda row, token, sampler: near_best(row, token, sampler, 4, 1.5),
    "relaxed(beta=2, tau=9.0)": lambda row, token, sampler: near_best(row, token, sampler, 2, 9.0),
}


def walked(draft, passes, forced=None):
    """The deepest node that passes, or is forced, with all its ancestors; of equals that of the likeliest path."""
    table, best = np.asarray(TABLE["table"]), []
    for b, (tokens, valid) in enumerate(zip(np.asarray(draft.tokens), np.asarray(draft.valid))):
        found = {0: (0, 0.0)}
        for node in range(1, len(tokens)):
            parent = draft.parents[node]
            row = table[tokens[parent]]
            good = passes(row, tokens[node]) or forced is not None and node in forced[b]
            if parent in found and valid[node] and good:
                depth, likelihood = found[parent]
                found[node] = depth + 1, likelihood + np.log(softmax(row))[tokens[node]]
        best.append(max(found, key=lambda node: (found[node][0], round(found[node][1], 4), -node)))
    return best


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("text", ORACLES)
def test_a_rule_accepts_what_its_formula_says(text, sampler):
    ours, draft = spec.build(text, VERIFIERS, "verifier", sampler=SAMPLERS[sampler]), drafts()
    expected = walked(draft, lambda row, token: ORACLES[text](row, token, SAMPLERS[sampler]))
    assert verdict(ours, draft).node.tolist() == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("text", [*LOSSY[:5], "dropout"])
def test_the_token_behind_the_accepted_ones_is_the_targets_own(text, sampler):
    ours, plain = (spec.build(name, VERIFIERS, "verifier", sampler=SAMPLERS[sampler]) for name in (text, "follow"))
    ours, plain = verdict(ours, drafts()), verdict(plain, drafts())
    np.testing.assert_array_equal(ours.targets, plain.targets)
    np.testing.assert_array_equal(ours.next, np.take_along_axis(plain.targets, ours.node[:, None], 1)[:, 0])


GREEDY = ["top_k(1)", "distance(0)", "relaxed(beta=1, tau=0)", "relaxed(beta=5, tau=0)", "relaxed(beta=1, tau=9)",
          "typical", "min_block(0)", "dropout(rate=0)", "dropout(rate=0, agreement=1, heads=8)"]


@pytest.mark.parametrize("text", GREEDY)
def test_at_their_strictest_they_are_greedy_verification(text):
    ours, plain = (spec.build(name, VERIFIERS, "verifier", sampler=Greedy()) for name in (text, "follow"))
    for seed in range(3):                      # of duplicate siblings they may take another one
        a, b = verdict(ours, drafts(seed=seed)), verdict(plain, drafts(seed=seed))
        np.testing.assert_array_equal(a.count, b.count)
        np.testing.assert_array_equal(a.next, b.next)


@pytest.mark.parametrize("text", ["min_block(0)", "dropout(rate=0)"])
def test_at_their_strictest_they_follow_the_samples_too(text):
    ours, plain = (spec.build(name, VERIFIERS, "verifier", sampler=SAMPLERS["sampled"]) for name in (text, "follow"))
    a, b = verdict(ours, drafts()), verdict(plain, drafts())
    np.testing.assert_array_equal(a.count, b.count)
    np.testing.assert_array_equal(a.next, b.next)


def test_equal_tokens_are_told_apart_by_their_ids_where_a_rule_is_strict():
    logits = jnp.asarray([[[1., 2., 2., 0.]] * 2] * 2)
    draft = Draft(jnp.asarray([[0, 1], [0, 2]]), (0, 0), jnp.ones((2, 2), bool), depth=1)
    for text in ("top_k(1)", "relaxed(beta=1, tau=0)"):
        assert spec.build(text, VERIFIERS, "verifier").passes(draft, logits)[:, 1].tolist() == [True, False]


ALL = ["typical(epsilon=0)", f"top_k({SIZE})", f"distance({SIZE})", f"relaxed(beta={SIZE}, tau=1e9)"]


@pytest.mark.parametrize("text", ALL)
def test_at_their_loosest_they_accept_the_longest_path_there_is(text):
    plain = Sample(temperature=1.0)
    expected = walked(drafts(), lambda row, token: True)
    assert verdict(spec.build(text, VERIFIERS, "verifier", sampler=plain), drafts()).node.tolist() == expected


@pytest.mark.parametrize("name, values", [
    ("typical", [dict(epsilon=x) for x in (0.5, 0.2, 0.05, 0.0)]),
    ("typical", [dict(epsilon=1.0, delta=x) for x in (1.0, 0.5, 0.1, 0.0)]),
    ("top_k", [dict(k=k) for k in (1, 2, 4, 6)]), ("distance", [dict(distance=d) for d in (0, 1, 3, 5)]),
    ("relaxed", [dict(beta=k) for k in (1, 2, 3, 5)]), ("relaxed", [dict(tau=x) for x in (0.0, 0.5, 1.0, 3.0)]),
    ("min_block", [dict(length=n) for n in (0, 1, 2, 3)]),
    ("dropout", [dict(heads=n, rate=0.5) for n in (1, 2, 4, 8)]),
    ("dropout", [dict(agreement=x, heads=8, rate=0.5) for x in (1.0, 0.5, 0.3, 0.0)]),
])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_looser_setting_accepts_more(name, values, sampler):
    counts = [verdict(VERIFIERS[name](sampler=SAMPLERS[sampler], **value), drafts(seed=2)).count for value in values]
    for tight, loose in zip(counts, counts[1:]):
        assert (tight <= loose).all()
    if not (name == "typical" and sampler == "greedy"):                          # where p is certain
        assert counts[0].sum() < counts[-1].sum()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_minimum_block_takes_the_first_path_as_far_as_it_is_there_and_then_follows(length):
    draft, paths = drafts(), []
    for valid in np.asarray(draft.valid):
        path = [0]
        while len(path) <= length:
            children = [node for node in range(1, len(valid)) if draft.parents[node] == path[-1] and valid[node]]
            if not children:
                break
            path.append(children[0])
        paths.append(path)
    expected = walked(draft, lambda row, token: token == row.argmax(), forced=paths)
    assert verdict(MinBlock(length=length), draft).node.tolist() == expected


def test_the_noise_of_dropout_is_that_of_the_step_and_of_the_sequence():
    rule, draft = Dropout(rate=0.5, heads=2), drafts()
    whole = verdict(rule, draft).node
    assert (verdict(dataclasses.replace(rule, rate=0.4999), draft).node == whole).mean() > 0.9
    other = Draft(draft.tokens[::-1], draft.parents, draft.valid[::-1], depth=draft.depth)
    assert (verdict(rule, other).node[::-1] != whole).any()                      # other keys, other masks


# Entropy-aware rejection, on chains drawn from a law of their own.

CHAIN = Shape.chain(3)


def chains(sharp=1.0):
    """Chains of three drawn from random laws q."""
    random = np.random.default_rng(5)
    logq = np.log(softmax(random.normal(size=(SEQUENCES, 3, SIZE)) * sharp))
    tokens = np.argmax(logq + random.gumbel(size=logq.shape), -1)
    tokens = np.concatenate([random.integers(0, SIZE, (SEQUENCES, 1)), tokens], 1)
    return Draft(jnp.asarray(tokens, jnp.int32), CHAIN.parents, jnp.ones(tokens.shape, bool), depth=3, kind="sampled",
                 logq=jnp.asarray(logq, jnp.float32))


@functools.partial(jax.jit, static_argnames="parents")
def _judgement(rule, draft, parents, uniform):
    logp = jax.nn.log_softmax(TABLE["table"][draft.tokens], -1)
    return rule.judge(draft.replace(parents=parents), logp, uniform)


def judgement(rule, draft):
    uniform = np.random.default_rng(7).random(draft.tokens.shape).astype(np.float32) / 2
    numbers = jax.tree.map(jnp.asarray, rule)
    return jax.tree.map(np.asarray, _judgement(numbers, draft.replace(parents=None), draft.parents, uniform))


@pytest.mark.parametrize("never", [dict(p_entropy=np.inf), dict(q_entropy=np.inf), dict(p_entropy=5)])
def test_entropy_aware_rejection_with_a_threshold_out_of_reach_is_rejection_to_the_bit(never):
    loose = dict(p_entropy=0, q_entropy=0, overlap=0)
    ours = judgement(EntropyAware(sampler=Sample(), **{**loose, **never}), chains())
    for a, b in zip(ours, judgement(Rejection(sampler=Sample()), chains())):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("overlap", [0.5, 1.0])
def test_entropy_aware_rejection_drops_tokens_where_both_are_unsure_of_the_same_ones(overlap):
    rule = EntropyAware(sampler=Sample(), p_entropy=1.2, q_entropy=1.0, overlap=overlap, best=2)
    draft, ours, plain = chains(), judgement(rule, chains()), judgement(Rejection(sampler=Sample()), chains())
    tokens, q = np.asarray(draft.tokens), np.exp(np.asarray(draft.logq))
    more = 0
    for b in range(SEQUENCES):
        expected = plain.node[b]
        for i in range(plain.node[b]):
            p = softmax(np.asarray(TABLE["table"])[tokens[b, i]])
            unsure = -(p * np.log(p)).sum() > 1.2 and -(q[b, i] * np.log(q[b, i])).sum() > 1.0
            shared = len(set(np.argsort(-p)[:2]) & set(np.argsort(-q[b, i])[:2])) / 2
            if unsure and shared >= overlap:
                expected, more = i, more + 1
                p[tokens[b, i + 1]] = 0
                np.testing.assert_allclose(ours.weights[b], p, rtol=1e-5)
                break
        else:
            np.testing.assert_array_equal(ours.weights[b], plain.weights[b])
        assert ours.node[b] == expected
    assert 0 < more < SEQUENCES


@pytest.mark.parametrize("text, exact", [
    ("entropy_aware(p_entropy=9.0)", True),
    ("entropy_aware(p_entropy=0.6, q_entropy=0.6, overlap=0.5, best=2)", False), ("relaxed(beta=2, tau=1.0)", False)])
def test_what_they_cost_is_measured_by_enumeration(text, exact):
    rule = spec.build(text, VERIFIERS, "verifier", sampler=Sample())
    cost = enumerate_law(rule, levels(1, 1), random_tables(count=4)).tv.max()
    assert cost < 1e-9 if exact else cost > 0.05


@pytest.mark.parametrize("name", ["typical", "top_k", "distance", "relaxed"])
def test_a_rule_of_the_law_alone_states_its_decision_and_the_law_behind_it(name):
    rule, draft = VERIFIERS[name](sampler=Sample()), drafts()
    ours = judgement(rule, draft)
    np.testing.assert_array_equal(ours.node, verdict(rule, draft).node)
    behind = np.take_along_axis(np.asarray(draft.tokens), ours.node[:, None], 1)[:, 0]
    np.testing.assert_allclose(ours.weights, softmax(np.asarray(TABLE["table"]))[behind], rtol=1e-4)
    assert set(np.unique(ours.chances)) == {0, 1}


# Through the compiled loop.

@pytest.fixture(scope="module")
def case():
    return dataclasses.replace(Case.tiny(num_layers=1), new_tokens=8)


def _oracle(case, rule, sampler):
    """Drafts that are right at depth 1 and 3, so that a strict rule takes one token."""
    answers = np.zeros((len(case.prompts), case.capacity), np.int32)
    for i, row in enumerate(case.reference(sampler)):
        answers[i, :len(row)] = row
    drafter = OracleDrafter(shape=Shape.chain(3), right=(True, False, True))
    decoder = Speculative(model=case.model, drafter=drafter, verifier=rule)
    return decoder, dataclasses.replace(case, params={**case.params, "draft": answers}, draft_rows=True)


def test_what_dropout_accepts_does_not_depend_on_the_batch(case):
    sampler = Sample(temperature=0.8)
    decoder, case = _oracle(case, Dropout(sampler=sampler, rate=0.3, heads=2), sampler)
    invariants.check_batch_independence(decoder, case)


def test_a_minimum_block_of_the_whole_draft_takes_drafts_as_they_come(case):
    decoder, case = _oracle(case, MinBlock(length=3), Greedy())
    info = loop.run(case.inputs(decoder), case.capacity).info
    assert (info.accepted == info.proposed).all() and info.accepted.sum() > 0


@pytest.mark.parametrize("text", LOSSY)
def test_every_one_of_them_says_that_it_is_lossy(text, case):
    rule = spec.build(text, VERIFIERS, "verifier", sampler=Sample())
    assert rule.guarantee == "lossy" and isinstance(rule, Relaxed) != (text == "entropy_aware")
    name = "draft_model" if text == "entropy_aware" else "prompt_lookup"
    options = dict(draft=case.model) if text == "entropy_aware" else {}
    decoder = make_decoder(name, case.model, sampler=Sample(), verifier=text, **options)
    assert decoder.guarantee == "lossy"
    assert make_decoder(name, case.model, verifier=text, **options).guarantee == (
        "exact" if text == "entropy_aware" else "lossy")                         # there is no law to compare


@pytest.mark.parametrize("text, message", [
    ("typical(epsilon=-0.1)", r"epsilon must be in \[0, 1\], got -0.1"),
    ("typical(delta=1.5)", r"delta must be in \[0, 1\], got 1.5"),
    ("typical(threshold=1)", "verifier 'typical' has no option 'threshold': expected one of epsilon, delta"),
    ("typical(epsilon='a')", "option 'epsilon' of verifier 'typical' must be of type float, got 'a'"),
    ("top_k(0)", "k must be at least 1, got 0"), ("distance(-1)", "distance must be at least 0, got -1"),
    ("relaxed(beta=0)", "beta must be at least 1, got 0"), ("relaxed(tau=-1.0)", "tau must be at least 0, got -1.0"),
    ("min_block(-1)", "length must be at least 0, got -1"), ("dropout(heads=9)", "heads must be from 1 to 8, got 9"),
    ("dropout(heads=0)", "heads must be from 1 to 8, got 0"), ("dropout(rate=1)", "rate must be in .*, got 1"),
    ("dropout(agreement=2)", r"agreement must be in \[0, 1\], got 2"),
    ("entropy_aware(overlap=2)", r"overlap must be in \[0, 1\], got 2"),
    ("entropy_aware(best=0)", "best must be at least 1, got 0"),
    ("entropy_aware(p_entropy=-1)", "p_entropy must be at least 0, got -1"),
])
def test_settings_out_of_range_are_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        spec.build(text, VERIFIERS, "verifier", sampler=Sample())
    assert "\n" not in str(error.value)


def test_settings_that_are_no_numbers_are_refused():
    for wrong in (lambda: Typical(epsilon=float("nan")), lambda: EntropyAware(sampler=Sample(), p_entropy=np.nan)):
        with pytest.raises(ValueError, match="got nan"):
            wrong()


def test_entropy_aware_rejection_refuses_what_rejection_refuses():
    with pytest.raises(ValueError, match="cannot verify a deterministic draft"):
        EntropyAware(sampler=Sample()).check(drafts())
