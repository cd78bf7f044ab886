"""Rules and drafts that only look right are told from right ones."""

import pytest

from parallax.testing.controls import CONTROLS


@pytest.mark.parametrize("name", CONTROLS)
def test_a_wrong_rule_is_found_out(name):
    assert CONTROLS[name]() > 0.01                                # right rules are below 1e-9
