"""What a worker is sent for: a whole job, one evaluation of a state, or the replay of one step."""

from dataclasses import dataclass

from quorate.spec.job import AverageSpec

MICRO_BATCH = "micro_batch"
"""Under this name a search for the largest batch gives its result, as a metric."""
PAUSED = "paused"
"""How a part of a run ends that was to train no further than a step before the last."""


@dataclass(frozen=True)
class RunMode:
    """Training by default. `until`: after this step save, and end this part of the run; the job is as long as it was.

    `evaluates_only`: evaluate the state as it is, and change nothing. `replayed_step`: train up to this step, and save
    the states before and after it instead of those that the job asks for. `averaged`: whether the averages are
    evaluated, or the parameters; None as the job does it. `batch_for`: find the largest micro-batch that fits into
    memory which so many workers share. `data`: what is evaluated in the place of the validation set: train, test, or a
    function that gives a dataset. `predict_to`: a folder; instead of being evaluated, each batch is given to predict(),
    and what comes of it is written there.
    """

    until: int | None = None
    evaluates_only: bool = False
    replayed_step: int | None = None
    averaged: bool | None = None
    batch_for: int = 0
    data: str = ""
    predict_to: str = ""

    @property
    def is_training(self) -> bool:
        """Whether what comes out is the job itself, so that being interrupted must not lose it."""
        return not self.evaluates_only and self.replayed_step is None and not self.batch_for

    def last_step(self, total: int) -> int:
        """The last step to train, of a job that has so many."""
        return min(total, self.replayed_step or total, self.until or total)

    def ending_after(self, step: int, total: int) -> str:
        """How it ends once it has done its last step: a replay is complete before the job is."""
        return PAUSED if self.is_training and step < total else "complete"

    def evaluates_averages(self, average: AverageSpec | None) -> bool:
        """Whether an evaluation looks at the averages, in a job with this key."""
        if average is None:
            return False
        return average.evaluate if self.averaged is None else self.averaged
