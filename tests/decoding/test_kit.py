"""Every registered decoder, greedy and sampled, through the same invariants."""

import dataclasses

import jax
import numpy as np
import pytest

from parallax.decoding import METHODS, Follow, Greedy, Sample, Shape, Speculative, loop, make_decoder
from parallax.testing import CHECKS, Case, OracleDrafter, checks_of

SAMPLERS = {"greedy": Greedy(), "sampled": Sample(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01)}
TREE = Shape.paths([(0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 0, 0), (1, 1, 0)])
ORACLES = {
    "chain_all_right": (Shape.chain(4), (True,) * 4),
    "chain_all_wrong": (Shape.chain(4), (False,) * 4),
    "chain_right_until_2": (Shape.chain(4), (True, True, False, True)),
    "tree": (TREE, (True, True, True)),
}


@pytest.fixture(scope="module")
def case():
    return Case.tiny()


DRAFTS = {"draft_model": 0.04, "draft_is_target": 0.0, "rejection": 0.04}        # how far the draft's weights are off
NAMES = [(name, sampler) for name in [*METHODS, "draft_is_target", *ORACLES] for sampler in SAMPLERS]
RUNS = [(*which, check) for which in NAMES for check in CHECKS]
RUNS += [(name, "sampled", check) for name in ("rejection", "staged_rejection", "mask_fill_rejection")
         for check in CHECKS if check != "equals_plain_decoding"]
# Each time: all checks of a few decoders, and of the others those that depend on the drafter. The rest is marked slow.
CORE = ("token_recycling", "rejection")
OFTEN = {("greedy", "every_step"), ("sampled", "equals_plain_decoding")}


def _often(name, sampler, check):
    return name in CORE or (sampler, check) in OFTEN


RUNS = [run if _often(*run) else pytest.param(*run, marks=pytest.mark.slow) for run in RUNS]


def _decoder(name, sampler, case):
    """The decoder and the case it runs on; an oracle's draft parameters are the reference itself."""
    method = "draft_model" if name in DRAFTS else name.removesuffix("_rejection")
    if method in METHODS and METHODS[method].needs_draft:
        target, random, off = case.params["target"], np.random.default_rng(1), DRAFTS.get(name, 0.04)
        draft = jax.tree.map(lambda w: w * (1 + off * random.normal(size=w.shape).astype(w.dtype)), target)
        decoder = make_decoder(method, case.model, sampler=SAMPLERS[sampler], draft=case.model,
                               verifier="rejection" if name.endswith("rejection") else "follow",
                               **({"draft_length": 3} if name in DRAFTS else {}))
        return decoder, dataclasses.replace(case, params={"target": target, "draft": draft})
    if name in METHODS:
        return make_decoder(name, case.model, sampler=SAMPLERS[sampler]), case
    shape, right = ORACLES[name]
    decoder = Speculative(model=case.model, drafter=OracleDrafter(shape=shape, right=right),
                          verifier=Follow(sampler=SAMPLERS[sampler]))
    answers = np.zeros((len(case.prompts), case.capacity), np.int32)
    for i, row in enumerate(case.reference(SAMPLERS[sampler])):
        answers[i, :len(row)] = row
    return decoder, dataclasses.replace(case, params={**case.params, "draft": answers}, draft_rows=True)


@pytest.mark.parametrize("name, sampler, check", RUNS)
def test_holds(name, sampler, check, case):
    CHECKS[check](*_decoder(name, sampler, case))


@pytest.mark.parametrize("name, sampler", [("draft_model", "greedy"), ("draft_model", "sampled"),
                                           ("rejection", "sampled")])
def test_the_draft_model_of_these_checks_is_right_now_and_then(name, sampler, case):
    decoder, case = _decoder(name, sampler, case)
    info = loop.run(case.inputs(decoder), case.capacity).info
    assert (0.1 * info.proposed < info.accepted).all() and (info.accepted < 0.9 * info.proposed).all()
    assert (info.accepted_at > 0).any(0).all()


@pytest.mark.parametrize("name, sampler", [("draft_model", "greedy"), ("draft_model", "sampled"),
                                           ("rejection", "sampled")])
def test_a_draft_model_that_is_the_target_is_always_right(name, sampler, case):
    decoder, _ = _decoder(name, sampler, case)
    same = dataclasses.replace(case, params={"target": case.params["target"], "draft": case.params["target"]})
    info = loop.run(same.inputs(decoder), case.capacity).info
    assert (info.emitted / info.target_forwards).tolist() == [4.0] * 3
    assert (info.accepted == info.proposed).all() and (info.accepted_at == info.target_forwards[:, None]).all()
    assert (info.draft_forwards == 3 * info.target_forwards).all()
    assert (info.draft_rows == 4 * info.target_forwards).all() and (info.target_rows == info.draft_rows).all()


def test_only_the_class_exact_promises_the_tokens_of_plain_decoding(case):
    ours = {name: set(checks_of(_decoder(name, "sampled", case)[0])) for name in ("draft_model", "rejection")}
    assert ours["draft_model"] == set(CHECKS) == ours["rejection"] | {"equals_plain_decoding"}
