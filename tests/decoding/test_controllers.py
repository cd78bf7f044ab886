"""Controllers against sequences worked out by hand, and through the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Greedy, Sample, check_settings, loop, make_decoder, spec
from parallax.decoding.base import Context
from parallax.decoding.control import CONTROLLERS, Level, best_length, tokens_per_ms
from parallax.testing import CHECKS, Case, MarkovModel, check_cache, markov_law, p_value, sample_many, tiny_model

DEPTH = 4


@pytest.fixture(scope="module")
def case():
    """A draft model that is near enough to its target to be right now and then."""
    case = Case.tiny(vocab_size=7)
    _, draft = tiny_model(seed=1, vocab_size=7)
    target = case.params["target"]
    mixed = jax.tree.map(lambda a, b: 0.93 * a + 0.07 * b, target, draft)
    return dataclasses.replace(case, params={"target": target, "draft": mixed}, new_tokens=14)


def build(text):
    return spec.build(text, CONTROLLERS, "controller")


def level(probabilities, total=None):
    logp = jnp.log(jnp.asarray(probabilities, jnp.float32))
    return Level(logp, logp if total is None else jnp.log(jnp.asarray(total, jnp.float32)))


def test_the_heuristic_adds_two_and_takes_one():
    ours = build("heuristic(start=3)")
    own, seen = ours.init(2, 6), []
    for drafted, accepted in (([3, 3], [3, 1]), ([5, 2], [5, 0]), ([6, 1], [5, 0]), ([5, 1], [1, 1]), ([4, 3], [0, 3])):
        assert ours.longest(own, 2, 6).tolist() == drafted
        own = ours.update(own, jnp.asarray(drafted), jnp.asarray(accepted), 6)
        seen.append(own.tolist())
    assert seen == [[5, 2], [6, 1], [5, 1], [4, 3], [3, 5]]
    assert build("heuristic(start=9)").init(1, 4).tolist() == [4]


def test_confidence_ends_every_path_behind_an_unlikely_token():
    ours = build("confidence(threshold=0.5)")
    assert ours.goes_on(level([[0.6], [0.4]])).tolist() == [[True], [False]]
    tree = [[0.1, 0.7], [0.3, 0.4], [0.0, 0.0]]
    assert ours.goes_on(level(tree)).tolist() == [[False, True], [False] * 2, [False] * 2]


def test_dynamic_depth_adds_up_the_paths_of_a_level():
    ours = build("dynamic_depth(threshold=0.5)")
    totals = [[0.3, 0.3], [0.3, 0.1], [0.6, 0.0], [0.0, 0.0]]
    assert ours.goes_on(level([[1.0, 1.0]] * 4, totals)).tolist() == [[True], [False], [True], [False]]


def test_the_best_length_is_that_of_a_plain_search():
    target = (1.0, 1.1, 1.5, 2.0)

    def plain(acceptance, draft):
        best, chosen = 0, 0
        for length in range(1, DEPTH + 1):
            tokens = 1 + sum(np.prod(acceptance[:d]) for d in range(1, length + 1))
            time = {2: 1.1, 3: 1.3, 4: 1.5, 5: 1.625}[length + 1] + draft * length
            if tokens / time > best:
                best, chosen = tokens / time, length
        return chosen

    rows = np.random.default_rng(0).uniform(0.05, 1, (50, DEPTH))
    for draft in (0.01, 0.1, 0.4):
        wanted = [plain(row, draft) for row in rows]
        assert best_length(jnp.asarray(rows), target, draft, DEPTH).tolist() == wanted
        assert 1 < len(set(wanted))
    assert tokens_per_ms(jnp.asarray([1.0, 1.0]), (2.0,), 0.5, 2).tolist() == pytest.approx([2 / 2.5, 3 / 3])


def test_the_cost_model_learns_each_depth_from_what_was_judged_there():
    ours = build("cost_model(prior=0.5, decay=0.8, target_ms=(1.0,), draft_ms=0.3)")
    own = ours.init(3, 3)
    drafted, accepted = jnp.asarray([3, 3, 1]), jnp.asarray([1, 3, 1])
    own = ours.update(own, drafted, accepted, 3)
    np.testing.assert_allclose(own, [[0.6, 0.4, 0.5], [0.6, 0.6, 0.6], [0.6, 0.5, 0.5]], rtol=1e-6)
    lengths = [ours.longest(jnp.full((1, 3), p), 1, 3).tolist() for p in (0.05, 0.7, 1.0)]
    assert lengths[0] == [1] and lengths[2] == [3] and lengths == sorted(lengths)
    free, dear = (build(f"cost_model(row_cost={cost})").longest(jnp.full((1, 8), 0.7), 1, 8) for cost in (0.0, 1.0))
    assert free > dear


RUNS = {"heuristic(start=2)": "", "confidence(threshold=0.35)": "", "dynamic_depth(threshold=0.5)": "beam(2, 4, 6)",
        "cost_model(draft_ms=0.4, decay=0.5)": "levels(2, 1, 1, 1)"}


@pytest.mark.often("dynamic|cost")
@pytest.mark.parametrize("controller", RUNS)
def test_controllers_hold_in_the_loop_and_shorten_drafts(controller, case):
    ours = make_decoder("draft_model", case.model, draft=case.model, controller=controller, tree=RUNS[controller])
    assert ours.depth == DEPTH
    for check in ("equals_plain_decoding", "batch_independence", "no_recompilation"):
        CHECKS[check](ours, case)
    inputs = case.inputs(ours)
    state = loop.prefill(inputs, case.capacity)
    while not np.asarray(state.done).all():            # what was chosen to go on, but did not, has no keys and values
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        check_cache(case.model, case.params["draft"], state.tokens, state.own.cache)
    info = loop.run(case.inputs(ours), case.capacity).info
    levels = info.draft_forwards / info.target_forwards
    assert (levels < DEPTH).any() and (levels > 1).any()
    assert (info.accepted > 0).any()


@jax.jit
def _propose(decoder, params, state):
    ctx = Context(decoder.model, params["target"], state.tokens, state.length, state.cache, state.key)
    return decoder.drafter.propose(params["draft"], state.own, ctx)[0]


def test_the_weak_token_stays_and_nothing_is_drafted_behind_it(case):
    whole = make_decoder("draft_model", case.model, draft=case.model, sampler=Sample(), verifier="rejection")
    ours = make_decoder("draft_model", case.model, draft=case.model, sampler=Sample(), verifier="rejection",
                        controller="confidence(threshold=0.35)")
    inputs = case.inputs(ours)
    state, lengths = loop.prefill(inputs, case.capacity), []
    for _ in range(4):
        full = _propose(whole, inputs.params, state)
        draft = _propose(inputs.decoder, inputs.params, state)
        for b in range(3):
            tokens = np.asarray(full.tokens)[b, 1:]
            chance = np.exp(np.asarray(full.logq)[b][np.arange(DEPTH), tokens])
            weak = np.flatnonzero(chance < 0.35)
            wanted = min(weak[0] + 1, DEPTH) if len(weak) else DEPTH
            assert np.asarray(draft.valid)[b].tolist() == [True] * (1 + wanted) + [False] * (DEPTH - wanted)
            assert np.asarray(draft.tokens)[b, 1:1 + wanted].tolist() == tokens[:wanted].tolist()
            assert draft.forwards[b] == wanted and draft.rows[b] == wanted + 1
            lengths.append(wanted)
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
    assert len(set(lengths)) > 1


TABLE = np.asarray([[1.0, 0.2, -0.5], [0.0, 1.1, 0.4], [0.6, -0.4, 0.9]])
GUESS = np.asarray([[0.2, 1.0, -0.5], [0.3, 0.6, 0.4], [1.6, -0.4, 0.3]])


@pytest.mark.often("confidence")
@pytest.mark.parametrize("controller", ["confidence(threshold=0.5)", "heuristic(start=1)"])
def test_a_stop_keeps_the_law(controller):
    model, target = MarkovModel.create(TABLE)
    ours = make_decoder("draft_model", model, draft=model, sampler=Sample(), verifier="rejection", draft_length=3,
                        controller=controller)
    params = {"target": target, "draft": MarkovModel.create(GUESS)[1]}
    law = markov_law(np.asarray(jax.nn.softmax(jnp.asarray(TABLE), -1)), 0, 4)
    assert p_value(sample_many(ours, params, [0], 4, 20000), law) > 1e-5


@pytest.mark.parametrize("text, message", [
    ("heuristic(start=0)", "start must be at least 1, got 0"),
    ("confidence(threshold=0)", "must be of type float|threshold must be in"),
    ("confidence(threshold=1.5)", r"threshold must be in \(0, 1\], got 1.5"),
    ("cost_model(draft_ms=-1)", "times must be numbers and not negative, got -1"),
    ("cost_model(target_ms=('a',))", "times must be numbers and not negative, got 'a'"),
    ("cost_model(prior=2.0)", "prior must be in"),
    ("confident", "unknown controller 'confident': expected one of constant, .*did you mean 'confidence'"),
])
def test_bad_controllers_are_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        check_settings("draft_model", {"controller": text}, draft=True)
    assert "\n" not in str(error.value)


def test_a_greedy_draft_has_the_confidence_of_its_model(case):
    """Not that of its sampler, for which the token that it takes is certain."""
    ours = make_decoder("draft_model", case.model, draft=case.model, sampler=Greedy(),
                        controller="confidence(threshold=0.999)")
    info = loop.run(case.inputs(ours), case.capacity).info
    assert (info.draft_forwards < DEPTH * info.target_forwards).all()
