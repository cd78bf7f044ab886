"""The statistics of the prover, against what is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Sample
from parallax.proof import law
from parallax.testing import MarkovModel, markov_law
from parallax.testing.oracle import p_value


def test_the_law_of_a_markov_target_is_that_of_its_table():
    table = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    model, params = MarkovModel.create(table)
    found = law.exact_law(model, params, Sample(temperature=0.5), (0, 2), 3)
    known = markov_law(np.asarray(jax.nn.softmax(jnp.asarray(table) / 0.5, -1)), 2, 3)
    np.testing.assert_allclose(found, known, rtol=1e-5)


@pytest.mark.parametrize("shift, fits", [(0.0, True), (0.1, False)])
def test_chi_square_tells_a_law_from_another(shift, fits):
    random = np.random.default_rng(1)
    right = random.dirichlet(np.ones(16))
    drawn = right * (1 - shift) + shift / 16
    samples = np.stack(np.unravel_index(random.choice(16, 4000, p=drawn), (4, 4)), 1)
    found = law.test(samples, right)
    assert (found["p"] > 1e-4) is fits
    assert (found["tv"] < 2 * found["noise"]) is fits


def test_pooling_rare_outcomes_changes_nothing_where_none_is_rare():
    random = np.random.default_rng(2)
    right = np.full(9, 1 / 9)
    samples = random.integers(0, 3, (3000, 2))
    assert law.test(samples, right)["p"] == pytest.approx(p_value(samples, right))


def test_what_cannot_occur_has_no_chance():
    assert law.test(np.asarray([[1, 1]] * 50), np.asarray([0.5, 0.5, 0, 0]))["p"] == 0


def test_outcomes_of_one_beginning_are_pooled_until_they_are_common():
    cells = law.pooled(np.asarray([0.05, 0.04, 0.3, 0.01, 0.5, 0.06, 0.03]), 0.1)
    assert cells.tolist() == [0, 0, 0, 1, 1, 1, 1]
    rare = np.full(4096, 1 / 4096)
    assert np.bincount(law.pooled(rare, 1 / 64), rare).min() >= 1 / 64
