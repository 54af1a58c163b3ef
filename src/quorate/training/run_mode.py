"""What a worker is sent for: a whole job, one evaluation of a state, or the replay of one step."""

from dataclasses import dataclass

from quorate.spec.job import AverageSpec

MICRO_BATCH = "micro_batch"
"""Under this name a search for the largest batch gives its result, as a metric."""


@dataclass(frozen=True)
class RunMode:
    """Training by default.

    `evaluates_only`: evaluate the state as it is, and change nothing. `replayed_step`: train up to this step, and save
    the states before and after it instead of those that the job asks for. `averaged`: whether the averages of the
    parameters are evaluated, or the parameters; None as the job does it. `batch_for`: find the largest micro-batch that
    fits into memory which so many workers share.
    """

    evaluates_only: bool = False
    replayed_step: int | None = None
    averaged: bool | None = None
    batch_for: int = 0

    @property
    def is_training(self) -> bool:
        """Whether what comes out is the job itself, so that being interrupted must not lose it."""
        return not self.evaluates_only and self.replayed_step is None and not self.batch_for

    def evaluates_averages(self, average: AverageSpec | None) -> bool:
        """Whether an evaluation looks at the averages, in a job with this key."""
        if average is None:
            return False
        return average.evaluate if self.averaged is None else self.averaged
