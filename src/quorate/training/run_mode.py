"""What a worker is sent for: a whole job, one evaluation of a state, or the replay of one step."""

from dataclasses import dataclass

from quorate.spec.job import AverageSpec


@dataclass(frozen=True)
class RunMode:
    """Training by default.

    `evaluates_only`: evaluate the state as it is, and change nothing. `replayed_step`: train up to this step, and save
    the states before and after it instead of those that the job asks for. `averaged`: whether the averages of the
    parameters are evaluated, or the parameters; None as the job does it.
    """

    evaluates_only: bool = False
    replayed_step: int | None = None
    averaged: bool | None = None

    @property
    def is_training(self) -> bool:
        """Whether what comes out is the job itself, so that being interrupted must not lose it."""
        return not self.evaluates_only and self.replayed_step is None

    def evaluates_averages(self, average: AverageSpec | None) -> bool:
        """Whether an evaluation looks at the averages, in a job with this key."""
        if average is None:
            return False
        return average.evaluate if self.averaged is None else self.averaged
