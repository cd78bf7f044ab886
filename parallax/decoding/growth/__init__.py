"""Tree policies by name: how a drafted tree grows. `levels(4, 2, 2)`, `beam(width=10, depth=6, nodes=60)`."""

from parallax.decoding.growth.base import Drawn, Rows, TreePolicy
from parallax.decoding.growth.beam import Beam, StochasticBeam
from parallax.decoding.growth.fixed import Chain, Confident, Delayed, Fixed, Levels, Paths, Sequoia, Static

TREES: dict[str, type[TreePolicy]] = {
    "chain": Chain,
    "levels": Levels,
    "paths": Paths,
    "delayed": Delayed,
    "static": Static,
    "sequoia": Sequoia,
    "confident": Confident,
    "beam": Beam,
    "stochastic_beam": StochasticBeam,
}

__all__ = ["Beam", "Chain", "Confident", "Delayed", "Drawn", "Fixed", "Levels", "Paths", "Rows", "Sequoia",
           "Static", "StochasticBeam", "TREES", "TreePolicy"]
