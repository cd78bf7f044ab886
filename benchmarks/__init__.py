"""Measurements. Ratios of engines that ran in alternation in one process; never part of the tests."""
