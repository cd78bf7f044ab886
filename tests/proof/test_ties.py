"""Near-ties in bfloat16, and the tree mask."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Greedy, Shape, Speculative
from parallax.models import Model
from parallax.proof import ties
from parallax.proof.record import TIE
from parallax.testing import CHECKS, Case, OracleDrafter


def logits(prefix):
    return np.asarray([8.0, 8.0 - 0.1 * len(prefix), 1.0])


def test_a_divergence_has_its_place_and_its_gap():
    found = ties.divergences([([1, 2, 3], [1, 2, 3]), ([1, 2, 0], [1, 2, 1]), ([1], [1, 2])], logits)
    assert [(d["text"], d["token"]) for d in found] == [(1, 2), (2, 1)]
    assert found[0]["gap"] == pytest.approx(0.2) and found[1]["gap"] == float("inf")


def test_a_token_that_is_none_of_the_two_best_is_no_near_tie():
    (found,) = ties.divergences([([1, 2, 2], [1, 2, 0])], logits)
    assert found["gap"] == 7 and not ties.record("tiny", "m", "follow", "exact", [found], 1).passed


@pytest.mark.parametrize("gap, guarantee, passed", [(8 * TIE, "exact", True), (8.1 * TIE, "exact", False),
                                                    (8.1 * TIE, "lossy", True)])
def test_exact_methods_may_part_at_near_ties_alone(gap, guarantee, passed):
    found = [{"text": 0, "token": 3, "gap": gap, "of": 8.0}]
    record = ties.record("tiny", "m", "follow", guarantee, found, 4)
    assert record.passed is passed and record.numbers["equal"] == 3 and bool(record.note) is not passed


def test_the_logits_behind_a_text_name_the_token_that_plain_decoding_writes():
    case = Case.tiny()
    prompt = list(case.prompts[0])
    written = case.reference(Greedy())[0]
    for text in (prompt, written[:17]):                            # in a power of two of slots, and one beyond
        assert ties.logits_behind(case.model, case.params["target"], text).argmax() == written[len(text)]


def test_gaps_are_those_of_penalised_logits():
    case = Case.tiny()
    text, params = list(case.prompts[2]), case.params["target"]
    plain = ties.logits_behind(case.model, params, text)
    apart = ties.logits_behind(case.model, params, text, Greedy(presence_penalty=1.5)) - plain
    assert np.flatnonzero(apart).tolist() == sorted(set(text)) and np.allclose(apart[text], -1.5, atol=1e-5)


TREE = Shape.paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@dataclasses.dataclass(frozen=True)
class Leaky(Model):
    """Wrong: every row of a block sees all rows in front of it, also those of other branches."""

    def forward(self, params, block, cache, **options):
        size = block.tokens.shape[1]
        visible = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), block.visible.shape)
        return super().forward(params, block._replace(visible=visible), cache, **options)


def _tree(kind):
    case = Case.tiny()
    model = kind(case.model.config)
    answers = np.random.default_rng(0).integers(0, 61, (3, case.capacity)).astype(np.int32)
    case = dataclasses.replace(case, model=model, params={**case.params, "draft": answers}, draft_rows=True)
    return Speculative(model=model, drafter=OracleDrafter(shape=TREE, right=(True, True, True))), case


def test_every_node_of_a_tree_has_the_logits_of_its_path():
    CHECKS["tree_mask"](*_tree(Model))


def test_a_mask_that_lets_branches_see_each_other_is_found_out():
    with pytest.raises(AssertionError, match="the logits of node . of row . are .* off those of its path alone"):
        CHECKS["tree_mask"](*_tree(Leaky))
