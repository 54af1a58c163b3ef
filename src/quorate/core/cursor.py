"""How far a job has come."""

from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What has been done at a step. An evaluation changes state (best metric, patience), so it is a phase too."""

    TRAINED = 0
    EVALUATED = 1


@dataclass(frozen=True, order=True)
class Cursor:
    """A point that every run of a job passes through; cursors are ordered, and the greater is the more advanced."""

    step: int = 0
    phase: Phase = Phase.TRAINED

    def trained(self) -> "Cursor":
        """After one more step."""
        return Cursor(self.step + 1, Phase.TRAINED)

    def evaluated(self) -> "Cursor":
        """After the evaluation at this step."""
        return Cursor(self.step, Phase.EVALUATED)
