"""How long a worker's own work takes it: what it waits for the others does not count."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Mean seconds over so many steps: `data_s` and `compute_s` for each lane that it hosts, `apply_s` for a step.

    `lanes` is how many it hosted at the last of these steps.
    """

    steps: int
    lanes: int
    data_s: float
    compute_s: float
    apply_s: float

    @property
    def lane_s(self) -> float:
        """Seconds that a lane takes."""
        return self.data_s + self.compute_s

    @property
    def work_s(self) -> float:
        """Seconds that a step takes of its own time."""
        return self.lanes * self.lane_s + self.apply_s
