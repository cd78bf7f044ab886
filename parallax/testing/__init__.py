"""What one needs to test a decoding method of one's own: tiny models, oracles with known answers, and the invariants.

    from parallax import testing
    case = testing.Case.tiny()
    testing.check_all(my_decoder, case)        # built on case.model
"""

from parallax.testing.enumerate import Law, Source, Tables, enumerate_law, random_tables
from parallax.testing.invariants import CHECKS, Case, check_all, check_cache, checks_of
from parallax.testing.oracle import (
    MarkovModel,
    OracleDrafter,
    SampledDrafter,
    markov_law,
    p_value,
    run_many,
    sample_many,
)
from parallax.testing.reference import reference_decode
from parallax.testing.tiny import tiny_config, tiny_model

__all__ = ["CHECKS", "Case", "Law", "MarkovModel", "OracleDrafter", "SampledDrafter", "Source", "Tables", "check_all",
           "check_cache", "checks_of", "enumerate_law", "markov_law", "p_value", "random_tables", "reference_decode",
           "run_many", "sample_many", "tiny_config", "tiny_model"]
