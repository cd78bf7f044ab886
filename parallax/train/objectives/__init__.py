"""Training objectives, one file each. `OBJECTIVES` is the one place that names them."""

from parallax.train.objectives.base import Objective
from parallax.train.objectives.distill import Distill
from parallax.train.objectives.next_token import NextToken

__all__ = ["OBJECTIVES", "Distill", "NextToken", "Objective"]

OBJECTIVES: dict[str, type] = {"next_token": NextToken, "distill": Distill}
