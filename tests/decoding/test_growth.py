"""The growth loop where a draft is not used as it was made: mixed with others, or forgotten."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import (
    DraftModel,
    Follow,
    Greedy,
    MaskFill,
    Sample,
    Shape,
    Speculative,
    acceptance,
    loop,
    make_decoder,
)
from parallax.decoding.base import Context, Drafter, policy
from parallax.models import Block, Model
from parallax.testing import CHECKS, Case, OracleDrafter, check_cache, tiny_config, tiny_model

DRAFT = dict(vocab_size=7, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, scan_layers=True)


@pytest.fixture(scope="module")
def case():
    case = Case.tiny(vocab_size=7)
    _, draft = tiny_model(seed=1, **DRAFT)
    return dataclasses.replace(case, params={**case.params, "draft": draft}, new_tokens=12)


@policy
class Instead(Drafter):
    """Lets `drafter` draft, and then offers the right answer, which the drafter does not know."""

    drafter: Drafter
    other: OracleDrafter

    @property
    def depth(self):
        return max(self.drafter.depth, self.other.depth)

    def init(self, params, ctx, prompt, prompt_length):
        return self.drafter.init(params["model"], ctx, prompt, prompt_length)

    def propose(self, params, own, ctx):
        _, own = self.drafter.propose(params["model"], own, ctx)
        return self.other.propose(params["answers"], (), ctx)[0], own

    def observe(self, params, own, advance, step, ctx):
        return self.drafter.observe(params["model"], own, advance, step, ctx)


MODEL = Model(tiny_config(**DRAFT))
DRAFTERS = [DraftModel(model=MODEL, tree=text) for text in ("chain(1)", "chain(3)", "levels(2, 2)", "beam(2, 3, 4)")]


@pytest.mark.often("1$")
@pytest.mark.parametrize("drafter", [*DRAFTERS, MaskFill(model=MODEL, draft_length=2)])
def test_the_cache_is_right_whoever_drafted_what_was_accepted(drafter, case):
    other = OracleDrafter(shape=Shape.chain(4), right=(True,) * 4)
    ours = Speculative(model=case.model, drafter=Instead(drafter=drafter, other=other), verifier=Follow())
    answers = np.zeros((3, case.capacity), np.int32)
    for i, row in enumerate(case.reference(Greedy())):
        answers[i, :len(row)] = row
    case = dataclasses.replace(case, params={**case.params, "draft": {"model": case.params["draft"],
                                                                      "answers": answers}})
    inputs = case.inputs(ours)
    state, most = loop.prefill(inputs, case.capacity), 0
    while not np.asarray(state.done).all():
        state, info = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        most = max(most, int(info.emitted.max()))
        cache = getattr(state.own, "cache", state.own)
        check_cache(drafter.model, case.params["draft"]["model"], state.tokens, cache)
        assert (np.asarray(state.length - cache.length) <= 2).all()
    assert most == 5                                                       # more than a draft begins with
    CHECKS["equals_plain_decoding"](ours, case)


def test_what_was_forgotten_is_cut_and_what_is_missing_is_read(case):
    ours = make_decoder("draft_model", case.model, draft=Model(tiny_config(**DRAFT)), draft_length=3)
    inputs = case.inputs(ours)
    state = loop.prefill(inputs, case.capacity)
    state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(3))
    rewind = jax.jit(lambda decoder, params, state, length: decoder.drafter.rewind(
        params["draft"], state.own, Context(decoder.model, params["target"], state.tokens, length, state.cache,
                                            state.key)))
    shorter = rewind(inputs.decoder, inputs.params, state, state.length - 2)
    assert (np.asarray(shorter.cache.length) == np.asarray(state.length) - 3).all()
    check_cache(ours.drafter.model, case.params["draft"], state.tokens, shorter.cache)
    longer = rewind(inputs.decoder, inputs.params, state._replace(own=shorter), state.length)
    assert (np.asarray(state.length - longer.cache.length) <= 2).all()
    check_cache(ours.drafter.model, case.params["draft"], state.tokens, longer.cache)


@pytest.mark.parametrize("tree, sampler, controller, certain", [
    ("chain(2)", None, "constant", True), ("levels(2, 1)", None, "constant", True),
    ("levels(2, 1)", Sample(top_k=2), "constant", False), ("chain(2)", Sample(top_k=2), "constant", True),
    ("chain(2)", None, "heuristic", False), ("confident(2)", None, "constant", False),
])
def test_a_draft_is_certain_if_no_node_can_be_missing(tree, sampler, controller, certain, case):
    settings = {} if sampler is None else dict(sampler=sampler)
    ours = make_decoder("draft_model", case.model, draft=Model(tiny_config(**DRAFT)), tree=tree, controller=controller,
                        **settings)
    inputs = case.inputs(ours)

    def propose(params, prompt):
        state = ours.init(params, prompt, inputs.prompt_length, jax.random.split(jax.random.key(0), 3), inputs.limit,
                          case.capacity)
        ctx = Context(ours.model, params["target"], state.tokens, state.length, state.cache, state.key)
        return ours.drafter.propose(params["draft"], state.own, ctx)[0]

    assert jax.eval_shape(propose, inputs.params, inputs.prompt).certain == certain


def test_penalties_count_the_drafted_tokens(case):
    """A strong penalty on what was said, drafts included, keeps tokens of one path apart."""
    strong = dataclasses.replace(Sample(), presence_penalty=1e4)
    for tree in ("chain(4)", "levels(2, 1, 1)"):
        ours = make_decoder("draft_model", case.model, sampler=strong, draft=Model(tiny_config(**DRAFT)), tree=tree)
        short = dataclasses.replace(case, prompts=((1, 2), (3,), (2,)))
        inputs = short.inputs(ours)
        state = loop.prefill(inputs, short.capacity)
        draft = jax.jit(lambda decoder, params, state: decoder.drafter.propose(params["draft"], state.own, Context(
            decoder.model, params["target"], state.tokens, state.length, state.cache, state.key))[0])(
                inputs.decoder, inputs.params, state)
        for b, prompt in enumerate(short.prompts):
            for node in range(1, draft.tokens.shape[1]):
                path = []
                while node:
                    path, node = [*path, int(draft.tokens[b, node])], draft.parents[node]
                assert len(set(path) | set(prompt)) == len(path) + len(prompt)


def test_acceptance_by_rank_is_counted_over_what_the_target_wrote(case):
    texts = loop.run(case.inputs(make_decoder("autoregressive", case.model)), case.capacity)
    model, params = Model(tiny_config(**DRAFT)), case.params["draft"]
    tokens, counts, written = np.asarray(texts.tokens), np.zeros(7), 0
    for row, first, end in zip(tokens, texts.prompt_length, texts.length):
        for i in range(int(first), int(end)):
            counts[_rank(model, params, row[:i], row[i])] += 1
            written += 1
    np.testing.assert_allclose(acceptance.measure(model, params, texts, ranks=7), counts / written, atol=1e-6)
    # The target's first choice is what it wrote; of fewer layers of it, some other is now and then.
    assert acceptance.measure(case.model, case.params["target"], texts, ranks=2) == (1.0, 0.0)
    assert acceptance.measure(case.model, case.params["target"], texts, ranks=1, layers=1)[0] < 1
    with pytest.raises(ValueError, match="ranks must be 1 to the vocabulary's 7, got 8"):
        acceptance.measure(model, params, texts)
    with pytest.raises(ValueError, match="the target wrote nothing"):
        acceptance.measure(model, params, texts._replace(length=texts.prompt_length), ranks=2)


def _rank(model, params, text, token):
    padded = np.zeros((1, 24), np.int32)
    padded[0, :len(text)] = text
    logits = np.asarray(_logits(model, params, padded))[0, len(text) - 1]
    return int(np.flatnonzero(np.argsort(-logits, kind="stable") == token)[0])


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens):
    size = tokens.shape[1]
    block = Block(tokens, jnp.arange(size)[None], jnp.tril(jnp.ones((size, size), bool)))
    return model.unembed(params, model.forward(params, block, model.new_cache(1, 0)).hidden)
