"""Every registered decoder, greedy and sampled, through the same invariants."""

import dataclasses

import numpy as np
import pytest

from parallax.decoding import METHODS, Follow, Greedy, Sample, Shape, Speculative, make_decoder
from parallax.testing import CHECKS, Case, OracleDrafter

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


def _decoder(name, sampler, case):
    """The decoder and the case it runs on; an oracle's draft parameters are the reference itself."""
    if name in METHODS:
        return make_decoder(name, case.model, sampler=SAMPLERS[sampler]), case
    shape, right = ORACLES[name]
    decoder = Speculative(model=case.model, drafter=OracleDrafter(shape=shape, right=right),
                          verifier=Follow(sampler=SAMPLERS[sampler]))
    answers = np.zeros((len(case.prompts), case.capacity), np.int32)
    for i, row in enumerate(case.reference(SAMPLERS[sampler])):
        answers[i, :len(row)] = row
    return decoder, dataclasses.replace(case, params={**case.params, "draft": answers}, draft_rows=True)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", [*METHODS, *ORACLES])
def test_holds(name, sampler, check, case):
    CHECKS[check](*_decoder(name, sampler, case))
