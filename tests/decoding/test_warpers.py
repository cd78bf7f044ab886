"""Warpers against transformers and numpy, penalties that count the drafts in front, settings of their own per row."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    Draft,
    Greedy,
    Rejection,
    Sample,
    Shape,
    Speculative,
    loop,
    make_decoder,
    make_sampler,
    tree,
    warpers,
)
from parallax.decoding.base import Context, Drafter, policy, static
from parallax.decoding.sampling import DRAFT, SAMPLING, argmax, noise_private, of_rows, sequences
from parallax.decoding.verify import Follow
from parallax.decoding.warpers import Seen
from parallax.testing import Case, MarkovModel, OracleDrafter, p_value, reference_decode, sample_many
from parallax.testing.invariants import texts

SIZE = 300


@pytest.fixture(scope="module")
def processors():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers").generation.logits_process


def _logits(rows=6, size=SIZE):
    return np.asarray(np.random.default_rng(0).normal(size=(rows, size)) * 3, np.float32)


THEIRS = [("top_k", "TopKLogitsWarper", (1, 7, SIZE + 9)), ("top_p", "TopPLogitsWarper", (0.01, 0.5, 0.97)),
          ("min_p", "MinPLogitsWarper", (0.01, 0.3, 1.0)), ("typical_p", "TypicalLogitsWarper", (0.05, 0.5, 0.95)),
          ("epsilon_cutoff", "EpsilonLogitsWarper", (0.001, 0.02, 0.9)),
          ("eta_cutoff", "EtaLogitsWarper", (0.001, 0.02, 0.9))]


@pytest.mark.parametrize("name, theirs, values", THEIRS)
def test_a_warper_keeps_what_that_of_transformers_keeps(processors, name, theirs, values):
    import torch
    logits = _logits()
    ours = jax.jit(getattr(warpers, name))
    for value in values:
        wanted = getattr(processors, theirs)(value)(None, torch.tensor(logits)).numpy()
        np.testing.assert_array_equal(ours(logits, value), wanted)
        assert np.isfinite(wanted).sum() < logits.size or value == SIZE + 9
    np.testing.assert_array_equal(ours(np.repeat(logits, 3, 0), np.tile(values, len(logits)))[1::3],
                                  ours(logits, values[1]))


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(processors, penalty):
    import torch
    logits, text = _logits(), np.random.default_rng(1).integers(0, SIZE, (6, 30))
    wanted = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(text), torch.tensor(logits)).numpy()
    ours = Greedy(repetition_penalty=penalty).penalise(logits[:, None], Seen.text(text, np.full(6, 30)))[:, 0]
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    assert (np.asarray(ours) != logits).any(1).all()


def test_the_order_is_that_of_transformers(processors):
    import torch
    from transformers import GenerationConfig, GenerationMixin
    settings = dict(repetition_penalty=1.2, temperature=0.7, top_k=60, top_p=0.9, min_p=0.01, typical_p=0.8,
                    epsilon_cutoff=0.002, eta_cutoff=0.001)
    bias = {5: 4.0, 17: -6.0}
    config = GenerationConfig(do_sample=True, sequence_bias=[[[token], value] for token, value in bias.items()],
                              **settings)
    config._eos_token_tensor = None
    model = GenerationMixin()
    model.config = types.SimpleNamespace(is_encoder_decoder=False)
    chain = model._get_logits_processor(config, input_ids_seq_length=4)
    logits, text = _logits(), np.random.default_rng(1).integers(0, SIZE, (6, 30))
    text[:, 0] = 5
    wanted = chain(torch.tensor(text), torch.tensor(logits)).numpy()
    sampler = make_sampler(**settings, logit_bias=bias)
    ours = sampler.warp(logits[:, None], Seen.text(text, np.full(6, 30)))[:, 0]
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(wanted))
    np.testing.assert_allclose(jax.nn.softmax(ours, -1), torch.softmax(torch.tensor(wanted), -1), rtol=1e-4)
    assert (1 < np.isfinite(wanted).sum(1)).any()


# Penalties.

def _penalised(row, text, repetition=1.0, presence=0.0, frequency=0.0, bias=()):
    """One row in numpy."""
    row = np.asarray(row, np.float64).copy()
    for token, value in bias:
        row[token] += value
    for token in set(text):
        row[token] = row[token] * repetition if row[token] < 0 else row[token] / repetition
        row[token] -= presence + frequency * text.count(token)
    return row


TREE = Shape.paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def test_penalties_count_the_text_and_the_drafts_in_front_of_each_node():
    random = np.random.default_rng(2)
    tokens, length = random.integers(0, 7, (3, 9)), np.asarray([3, 9, 6])
    nodes, size = random.integers(0, 7, (3, len(TREE.parents))), len(TREE.parents)
    nodes[:, 0] = tokens[np.arange(3), length - 1]
    draft = Draft(jnp.asarray(nodes), TREE.parents, jnp.ones(nodes.shape, bool), depth=TREE.depth)
    ctx = Context(None, None, jnp.asarray(tokens), jnp.asarray(length), None, None)
    logits = random.normal(size=(3, size, 7)).astype(np.float32)
    settings = dict(repetition=1.4, presence=0.3, frequency=0.2, bias=((2, 1.5), (0, -3.0)))
    sampler = make_sampler(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2,
                           logit_bias={2: 1.5, "0": -3.0})
    ours = sampler.penalise(logits, tree.seen(draft, ctx))
    above = tree.ancestors(TREE.parents, TREE.depth)
    for b, n in itertools.product(range(3), range(size)):
        text = tokens[b, :length[b]].tolist() + nodes[b, 1:][above[n, 1:]].tolist()
        np.testing.assert_allclose(ours[b, n], _penalised(logits[b, n], text, **settings), rtol=1e-5, atol=1e-6)
        taken = sampler.draw(logits, None, None, 0, 0, tree.seen(draft, ctx))[b, n]
        assert taken == np.argmax(ours[b, n])


def test_penalties_without_a_text_are_refused_and_bias_needs_none():
    with pytest.raises(ValueError, match="penalties count the tokens of the text so far"):
        make_sampler(presence_penalty=1.0).draw(jnp.zeros((1, 1, 4)), None, None, 0, 0)
    assert make_sampler(logit_bias={3: 1}).draw(jnp.zeros((1, 1, 4)), None, None, 0, 0).tolist() == [[3]]


def test_a_sampler_without_settings_runs_the_program_it_always_ran():
    logits = jnp.zeros((2, 3, 9))
    lowered = jax.jit(lambda sampler, x: sampler.draw(x, None, None, 0, 0)).lower(Greedy(), logits).as_text()
    assert lowered == jax.jit(lambda sampler, x: argmax(x)).lower(Greedy(), logits).as_text()
    assert jax.tree.leaves(Greedy()) == [] and len(jax.tree.leaves(Sample(temperature=0.5))) == 1


# Settings of their own for each sequence.

MIXED = dict(temperature=[0.0, 0.7, 1.4], top_k=[0, 5, 0], top_p=[0.5, 1.0, 0.9], min_p=[0.0, 0.02, 0.3],
             typical_p=[1.0, 0.9, 1.0], epsilon_cutoff=[0.0, 0.0, 0.01], eta_cutoff=[0.01, 0.0, 0.0],
             repetition_penalty=[1.2, 1.0, 1.1], presence_penalty=[0.0, 0.5, 0.0], frequency_penalty=[0.1, 0.0, 0.3],
             logit_bias=[{3: 2.0}, {}, {4: -1.0, 5: 1.0}])


def _alone(i):
    """The settings of one row, without those that temperature 0 forbids."""
    settings = {name: values[i] for name, values in MIXED.items()}
    greedy = settings["temperature"] == 0
    return make_sampler(**{name: None if greedy and name in ("top_p", "eta_cutoff") else value
                           for name, value in settings.items()})


def _case():
    """Prompts of one length, so that the reference compiles one program per sampler."""
    case = Case.tiny(num_layers=1)
    draw = np.random.default_rng(4).integers(0, case.model.config.vocab_size, (3, 6)).tolist()
    return dataclasses.replace(case, prompts=tuple(map(tuple, draw)), new_tokens=15)


CASE = _case()


def numbers(sampler):
    """As the loop sees them, so that the reference warps the same float32 values."""
    return jax.tree.map(jnp.asarray, sampler)


def test_each_row_is_warped_as_it_would_be_alone_to_the_bit():
    sampler, logits = make_sampler(**MIXED), _logits(3)[:, None].repeat(2, 1)
    seen = Seen.text(np.random.default_rng(3).integers(0, 9, (3, 20)), np.full(3, 20))
    warp = jax.jit(lambda sampler, logits, seen: sampler.warp(logits, seen))
    together = warp(sampler, logits, seen)
    for i in range(3):
        one = slice(i, i + 1)
        alone = warp(numbers(_alone(i)), logits[one], jax.tree.map(lambda x, one=one: x[one], seen))
        np.testing.assert_array_equal(np.isfinite(together[one]), np.isfinite(alone))
        np.testing.assert_array_equal(together[one], alone)


@pytest.mark.parametrize("name", ["autoregressive", "token_recycling"])
def test_a_batch_of_mixed_settings_decodes_each_row_as_it_would_be_alone(name):
    mixed = make_decoder(name, CASE.model, sampler=make_sampler(**MIXED))
    together = texts(loop.run(CASE.inputs(mixed), CASE.capacity))
    for i, prompt in enumerate(CASE.prompts):
        wanted = reference_decode(CASE.model, CASE.params["target"], prompt, CASE.capacity, sampler=numbers(_alone(i)),
                                  seed=CASE.seed, row_id=i)
        assert together[i] == wanted
        part = make_decoder(name, CASE.model, sampler=of_rows(make_sampler(**MIXED), i, i + 1))
        assert texts(loop.run(CASE.inputs(part, [i]), CASE.capacity)) == [wanted]


def test_settings_for_another_number_of_sequences_are_refused():
    decoder = make_decoder("autoregressive", CASE.model, sampler=make_sampler([0.5, 1.0]))
    with pytest.raises(ValueError, match="a setting of the sampler has 2 values for 3 sequences"):
        loop.run(CASE.inputs(decoder), CASE.capacity)
    assert sequences(make_sampler(**MIXED)) == {3} and sequences(make_sampler(0.5, top_k=3)) == set()
    assert sequences(make_sampler(logit_bias=[{1: 1.0}, {}])) == {2}
    assert sequences(make_sampler(logit_bias={1: 1.0})) == set()


# The same tokens with drafts as without, under every warper.

WARPED = {"repetition": dict(repetition_penalty=1.3), "presence": dict(presence_penalty=1.5),
          "frequency": dict(frequency_penalty=0.9), "bias": dict(logit_bias={3: 2.5, 7: -4.0}),
          "all": dict(temperature=0.9, top_k=40, top_p=0.97, min_p=0.001, typical_p=0.95, epsilon_cutoff=1e-4,
                      eta_cutoff=1e-4, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
                      logit_bias={3: 1.0})}
WARPED |= {name: {"temperature": 1.3, name: value} for name, value in dict(
    top_k=2, top_p=0.6, min_p=0.4, typical_p=0.4, epsilon_cutoff=0.2, eta_cutoff=0.3).items()}


@functools.cache
def _reference(name):
    return CASE.reference(numbers(make_sampler(**WARPED[name])))


@functools.cache
def _unwarped(temperature):
    return CASE.reference(numbers(make_sampler(temperature)))


@pytest.mark.often("all|frequency")
@pytest.mark.parametrize("name, drafter", [*((name, "token_recycling") for name in WARPED), ("all", "prompt_lookup")])
def test_drafts_change_no_token_under_any_warper(name, drafter):
    decoder = make_decoder(drafter, CASE.model, sampler=make_sampler(**WARPED[name]))
    assert texts(loop.run(CASE.inputs(decoder), CASE.capacity)) == _reference(name)
    assert _reference(name) != _unwarped(WARPED[name].get("temperature", 0.0))


@pytest.mark.parametrize("name", ["frequency", "all"])
def test_drafts_that_are_right_are_accepted_for_their_penalties_count_the_path(name):
    drafter = OracleDrafter(shape=Shape.chain(4), right=(True,) * 4)
    decoder = Speculative(model=CASE.model, drafter=drafter, verifier=Follow(sampler=make_sampler(**WARPED[name])))
    case = dataclasses.replace(CASE, params={**CASE.params, "draft": np.asarray(_reference(name))}, draft_rows=True)
    result = loop.run(case.inputs(decoder), case.capacity)
    assert texts(result) == _reference(name) and result.info.target_forwards.tolist() == [3, 3, 3]


# Rejection sampling: the law of three tokens, by brute force, since penalties make it depend on the whole text.

TABLE = np.asarray([[0.3, 1.1, 0.0], [0.9, -0.2, 0.4], [0.1, 0.2, 1.2]], np.float32)
GUESS = np.asarray([[1.2, 0.1, 0.3], [0.5, 0.6, -0.9], [1.0, -0.4, 0.2]], np.float32)
DRAWS, NEW, PROMPT = 4000, 3, [0, 1, 0]
MODEL, TARGET = MarkovModel.create(TABLE)


@policy
class Chain(Drafter):
    """Two tokens drawn from the table params["draft"], warped as the target's with the drafts so far counted.

    lies: the law that it states leaves the drafts so far out of the penalties.
    """

    sampler: Sample
    depth: int = static(default=2)
    kind: str = static(default="sampled")
    lies: bool = static(default=False)

    def propose(self, params, own, ctx):
        tokens, laws = [jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)], []
        for i in range(self.depth):
            path = jnp.concatenate([*tokens[1:], tokens[0][:, :0]], 1)[:, None]
            seen = Seen(ctx.tokens, ctx.length, path, jnp.ones_like(path, bool))
            logits = params["table"][tokens[-1]]
            warped = self.sampler.warp(logits, seen)
            noise = noise_private(ctx.key, ctx.length, ctx.length + i, DRAFT, logits.shape[-1])[:, None]
            tokens.append(argmax(warped + noise))
            logged = self.sampler.warp(logits, Seen.text(ctx.tokens, ctx.length)) if self.lies else warped
            laws.append(jax.nn.log_softmax(logged, -1))
        tokens = jnp.concatenate(tokens, 1)
        return Draft(tokens, Shape.chain(self.depth).parents, jnp.ones_like(tokens, bool), depth=self.depth,
                     kind="sampled", logq=jnp.concatenate(laws, 1), certain=True), own


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def truncated(row, top_k=None, top_p=None, min_p=None, typical_p=None, epsilon_cutoff=None, eta_cutoff=None):
    """The law of one row of logits in numpy, by sorting."""
    p = softmax(row)
    if top_k:
        p[p < np.sort(p)[-top_k]] = 0
    if top_p:
        p[[i for i in range(3) if p[p > p[i]].sum() >= top_p * p.sum()]] = 0
    if min_p:
        p[p < min_p * p.max()] = 0
    p /= p.sum()
    entropy = -sum(x * np.log(x) for x in p if x)
    if typical_p:
        far = [abs(-np.log(x) - entropy) if x else np.inf for x in p]
        p[[i for i in range(3) if sum(p[j] for j in range(3) if far[j] < far[i]) >= typical_p]] = 0
    for cut in (epsilon_cutoff, eta_cutoff and min(eta_cutoff, eta_cutoff ** 0.5 * np.exp(-entropy))):
        if cut:
            p[(p < cut) & (p < p.max())] = 0
    return p / p.sum()


def law(temperature=1.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None, **rest):
    """Of NEW tokens behind PROMPT."""
    result = np.ones((3,) * NEW)
    for new in itertools.product(range(3), repeat=NEW):
        for i, token in enumerate(new):
            text = [*PROMPT, *new[:i]]
            row = _penalised(TABLE[text[-1]], text, repetition_penalty, presence_penalty, frequency_penalty,
                             (logit_bias or {}).items())
            result[new] *= truncated(row / temperature, **rest)[token]
    return result.reshape(-1)


LAWS = {"repetition": dict(temperature=0.8, repetition_penalty=1.5), "presence": dict(presence_penalty=1.5),
        "frequency": dict(frequency_penalty=0.9), "bias": dict(logit_bias={1: 1.2, 2: -0.7}), "top_k": dict(top_k=2),
        "top_p": dict(top_p=0.8), "min_p": dict(min_p=0.45), "typical_p": dict(typical_p=0.5),
        "epsilon_cutoff": dict(epsilon_cutoff=0.25), "eta_cutoff": dict(eta_cutoff=0.5),
        "all": dict(temperature=1.3, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={0: 0.5}, top_k=2,
                    typical_p=0.9)}


def _drawn(settings, **changes):
    sampler = make_sampler(**{"temperature": 1.0, **settings})
    decoder = Speculative(model=MODEL, drafter=Chain(sampler=sampler, **changes), verifier=Rejection(sampler=sampler))
    return sample_many(decoder, {"target": TARGET, "draft": MarkovModel.create(GUESS)[1]}, PROMPT, NEW, DRAWS)


@pytest.mark.often("all|top_p")
@pytest.mark.parametrize("name", LAWS)
def test_rejection_sampling_keeps_the_law_under_every_warper(name):
    drawn = _drawn(LAWS[name])
    assert p_value(drawn, law(**LAWS[name])) > 1e-6
    assert p_value(drawn, law()) < 1e-6


def test_a_draft_law_that_forgets_the_drafts_in_front_is_found_out():
    assert p_value(_drawn(LAWS["frequency"], lies=True), law(**LAWS["frequency"])) < 1e-6


# What is refused.

@pytest.mark.parametrize("settings, message", [
    (dict(typical_p=0), r"typical_p must be in \(0, 1\], got 0"),
    (dict(epsilon_cutoff=1), r"epsilon_cutoff must be in \[0, 1\), got 1"),
    (dict(eta_cutoff=-0.1), r"eta_cutoff must be in \[0, 1\), got -0.1"),
    (dict(repetition_penalty=0), "repetition_penalty must be from 1e-6 to 1e6, 1 for none, got 0"),
    (dict(repetition_penalty=1e-50), "repetition_penalty must be from 1e-6 to 1e6, 1 for none, got 1e-50"),
    (dict(temperature=1e-50), "temperature must be 0 .* got 1e-50"),
    (dict(presence_penalty=2.5), r"presence_penalty must be in \[-2, 2\], got 2.5"),
    (dict(frequency_penalty=float("nan")), r"frequency_penalty must be in \[-2, 2\], got nan"),
    (dict(temperature=float("inf")), "temperature must be 0 .* got inf"),
    (dict(temperature=[0.5, -1.0]), "temperature must be 0 .* got -1 for sequence 1"),
    (dict(temperature=[]), "temperature must be a number, or a list of one per sequence"),
    (dict(temperature=[[0.5]]), "temperature must be a number, or a list of one per sequence"),
    (dict(temperature="warm"), "temperature must be a number, or a list of one per sequence, got 'warm'"),
    (dict(logit_bias="{5: 1}"), r'logit_bias must be \{token id: number\}, as in \{"50256": -100\}, got'),
    (dict(logit_bias="[1]"), "logit_bias must be"), (dict(logit_bias={"a": 1}), "logit_bias must be"),
    (dict(logit_bias={1.5: 1}), "logit_bias must be"), (dict(logit_bias={-1: 1}), "ids from 0 .*, got -1: 1"),
    (dict(logit_bias={1: float("inf")}), "numbers from -1e30 to 1e30, got 1: inf"),
    (dict(logit_bias={1: 1e39}), "numbers from -1e30 to 1e30, got 1: 1e\\+39"),
    (dict(temperature=0, typical_p=0.5), "change nothing at temperature 0"),
    (dict(temperature=[0, 0], top_k=[5, 0]), "change nothing at temperature 0"),
])
def test_settings_outside_their_range_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make_sampler(**{"temperature": 1.0, **settings})
    assert "\n" not in str(error.value)


def test_settings_that_change_nothing_are_left_out_of_the_program():
    nothing = dict(typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0, repetition_penalty=1.0, presence_penalty=0.0,
                   frequency_penalty=0, logit_bias="", top_k=[0, 0], top_p=[1.0, 1.0])
    assert make_sampler(0.7, **nothing) == Sample(temperature=0.7)
    assert make_sampler(0.0, **nothing) == make_sampler([0, 0]) == make_sampler(logit_bias={}) == Greedy()
    assert set(nothing) | {"temperature", "min_p"} == set(SAMPLING)
