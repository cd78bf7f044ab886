"""The rules and whole texts are the same with the kernels and without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import DraftModel, Follow, Greedy, Rejection, Sample, Shape, Speculative, loop, make_decoder
from parallax.decoding.base import Context, Draft, policy
from parallax.decoding.sampling import row_keys
from parallax.testing import Case, MarkovModel, OracleDrafter
from parallax.testing.invariants import texts

SIZE, BATCH = 300, 24
TABLE = (np.random.default_rng(0).normal(size=(SIZE, SIZE)) * 2).astype(np.float32)
GUESS = TABLE + np.random.default_rng(1).normal(size=TABLE.shape).astype(np.float32) * 0.7
MODEL, TARGET = MarkovModel.create(TABLE)
CHAIN, TREE = Shape.chain(4), Shape.levels((3, 2, 1))
SAMPLERS = {"plain": Sample(), "cold": Sample(temperature=0.3), "warped": Sample(temperature=1.5, top_k=20, top_p=0.9),
            "mixed": Sample(temperature=np.linspace(0, 2, BATCH, dtype=np.float32))}


def using(kernels, model=MODEL):
    return dataclasses.replace(model, config=model.config.replace(kernels=kernels))


def step(sampler, shape):
    """(draft, logits, context without a model) of sequences whose drafts are near the target's law."""
    random = np.random.default_rng(2)
    size = len(shape.parents)
    logits = (random.normal(size=(BATCH, size, SIZE)) * 3).astype(np.float32)
    logq = np.array(jax.nn.log_softmax(sampler.warp(jnp.asarray(logits + random.normal(size=logits.shape)))))
    tokens = random.integers(SIZE, size=(BATCH, size))
    for n, parent in enumerate(shape.parents[1:], 1):
        for b in range(BATCH):
            law = np.exp(logq[b, parent], dtype=np.float64)
            tokens[b, n] = random.choice(SIZE, p=law / law.sum())
    valid = random.random(tokens.shape) < 0.95
    draft = Draft(jnp.asarray(tokens, jnp.int32), shape.parents, jnp.asarray(valid), depth=shape.depth, kind="sampled",
                  replacement=True, logq=jnp.asarray(logq[:, :-1]))
    keys = row_keys(jax.random.key(4), jnp.arange(BATCH))
    context = Context(None, None, draft.tokens, jnp.arange(BATCH) % 7 + 2, None, keys)
    return draft, jnp.asarray(logits), context


def program(rule, kernels, draft, context):
    return lambda logits: rule(draft, logits, None, context._replace(model=using(kernels)))


@pytest.mark.parametrize("rule, shape, name", [
    (Follow, TREE, "plain"), (Follow, TREE, "mixed"), (Follow, CHAIN, "warped"), (Rejection, CHAIN, "plain"),
    (Rejection, CHAIN, "cold"), (Rejection, CHAIN, "mixed")])
def test_the_verdict_is_the_same_with_kernels(rule, shape, name):
    sampler = SAMPLERS[name]
    draft, logits, context = step(sampler, shape)
    ours, plain = (jax.jit(program(rule(sampler=sampler), kernels, draft, context))(logits)
                   for kernels in ("pallas", "xla"))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    assert len(set(np.asarray(ours.count).tolist())) > 1


@policy
class Own(Rejection):
    """Judges in its own way."""

    def judge(self, draft, logp, uniform):
        return super().judge(draft, logp, uniform)


def called(jaxpr):
    """The names of the kernels that a program calls, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["jaxpr"].debug_info.func_src_info.split()[0]
        else:
            for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                yield from called(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("rule, shape, calls", [
    (Follow(sampler=Greedy()), TREE, {"vocabulary"}), (Follow(sampler=Sample()), TREE, {"vocabulary"}),
    (Rejection(sampler=Sample()), CHAIN, {"vocabulary", "leftovers"}), (Rejection(sampler=Sample()), TREE, set()),
    (Own(sampler=Sample()), CHAIN, set())])
def test_greedy_and_sampled_following_and_rejection_of_chains_run_the_kernels(rule, shape, calls):
    draft, logits, context = step(Sample(), shape)
    for kernels, expected in ("pallas", calls), ("xla", set()), ("auto", set()):             # of a host with only CPUs
        assert set(called(jax.make_jaxpr(program(rule, kernels, draft, context))(logits).jaxpr)) == expected, kernels


DECODERS = {
    "greedy": lambda model: make_decoder("autoregressive", model, sampler=Greedy()),
    "sampled": lambda model: make_decoder("autoregressive", model, sampler=SAMPLERS["cold"]),
    "tree": lambda model: Speculative(model=model, drafter=OracleDrafter(shape=TREE, right=(True, True, False)),
                                      verifier=Follow(sampler=SAMPLERS["plain"])),
    "rejection": lambda model: Speculative(model=model, drafter=DraftModel(
        model=MODEL, sampler=SAMPLERS["plain"], draft_length=3, kind="sampled"),
        verifier=Rejection(sampler=SAMPLERS["plain"])),
}


@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_the_same_with_kernels(name):
    answers = np.random.default_rng(3).integers(SIZE, size=(3, 32))
    case = Case(MODEL, {"target": TARGET, "draft": {"table": GUESS} if name == "rejection" else answers},
                ((1, 2, 3), (5,), (7, 8)))
    runs = [loop.run(dataclasses.replace(case, model=using(kernels)).inputs(DECODERS[name](using(kernels))),
                     case.capacity) for kernels in ("pallas", "xla")]
    assert texts(runs[0]) == texts(runs[1])
    jax.tree.map(np.testing.assert_array_equal, runs[0].info, runs[1].info)


@pytest.mark.slow
def test_the_text_of_a_transformer_is_the_same_with_kernels():
    case = dataclasses.replace(Case.tiny(num_layers=1), new_tokens=12)
    decoder = make_decoder("autoregressive", using("pallas", case.model), sampler=Sample(temperature=0.7))
    assert texts(loop.run(case.inputs(decoder), case.capacity)) == case.reference(Sample(temperature=0.7))
