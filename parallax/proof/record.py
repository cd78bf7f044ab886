"""What a check found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

# The limits that checks hold their numbers to; the table and the JSON file state them.
LAW = 1e-9              # largest distance (total variation) of an enumerated law, computed in float64
CAUGHT = 1e-3           # distance from which a negative control counts as told apart, beyond all rounding
CHANCE = 1e-4           # smallest p-value of a chi-square test
TIE = 2.0 ** -5         # largest gap of a near-tie in bfloat16, of the largest logit: four times what rounding it costs


TARGET, RULE, CONTROL = "tiny target", "rule", "control"


@dataclasses.dataclass(frozen=True)
class Record:
    """One check of one claim.

    Attributes:
      on: what it was checked on: TARGET, RULE (toy tables), CONTROL (a negative control), or the name of a model.
      method, verifier: what was checked; a rule by itself has no method, a control is named by its verifier.
      claim: the guarantee that was claimed; `rejected` for a control.
      check: the name of the check.
      passed: whether the claim stood.
      numbers: what was measured.
      note: what went wrong, in one line.
      seconds: what the check took.
    """

    on: str
    method: str
    verifier: str
    claim: str
    check: str
    passed: bool
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Task:
    """A check to run. `failed(what went wrong)` is its record if it raises."""

    label: str
    check: Callable[[], Record]
    failed: Callable[[str], Record]

    def run(self) -> Record:
        """Whatever a check raises, its claim was not proven; one broken method must not hide all others."""
        began = time.perf_counter()
        try:
            record = self.check()
        except AssertionError as error:
            record = self.failed(_line(str(error)))
        except Exception as error:
            record = self.failed(_line(f"{type(error).__name__}: {error}"))
        return dataclasses.replace(record, seconds=round(time.perf_counter() - began, 2))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
