"""A loop is timed in blocks of steps, so that what disturbs one of them does not spoil the median."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

BLOCKS = 10


@dataclass(frozen=True)
class Blocks:
    """Steps that do not count, and steps that do."""

    warm_up: int
    steps: int

    @property
    def total(self) -> int:
        """All steps that have to be taken."""
        return self.warm_up + self.steps

    @property
    def ends(self) -> tuple[int, ...]:
        """The steps at whose end the time is taken: first the end of the warm-up, then that of each block."""
        blocks = min(BLOCKS, self.steps)
        return tuple(self.warm_up + self.steps * block // blocks for block in range(blocks + 1))

    def ms(self, seconds: Mapping[int, float]) -> list[float]:
        """Milliseconds of a step in each block, from the times at which steps ended: all that passed, by the steps."""
        return [
            (seconds[later] - seconds[earlier]) / (later - earlier) * 1000 for earlier, later in pairwise(self.ends)
        ]

    def mean_ms(self, seconds: Mapping[int, float]) -> float:
        """Over all blocks: unlike the median, it has a share of all that happens only now and then."""
        return (seconds[self.total] - seconds[self.warm_up]) / self.steps * 1000
