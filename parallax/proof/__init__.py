"""Proving what the decoding methods claim.

`subjects` says what can be proven, `tokens`, `structure`, `law`, `ties`, `rules` and `controls` hold the checks (each
gives a `Record`), `real` the checks on a model of the user's, `table` shows the records, `command` runs all of that.
"""
