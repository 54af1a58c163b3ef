"""What a worker asks of a task that has the training loop itself."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from quorate.data.sampler import Sampler
from quorate.observe.events import StepCompleted
from quorate.spec.job import JobSpec
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.task import Task


class HostedLoop(Task):
    """A task whose code runs from one step to the next, beside the loop of the worker."""

    @property
    @abstractmethod
    def clip_norm(self) -> float | None:
        """How gradients are clipped, if the loop says so."""

    @abstractmethod
    def check(self, spec: JobSpec) -> None:
        """Refuse keys of the job that do not go with a loop of one's own."""

    @abstractmethod
    def take_up(self, progress: Progress, sampler: Sampler) -> None:
        """Go on from what is loaded next."""

    # --- its turns, as `TurnsLoop` gives them

    @abstractmethod
    def enter(self, progress: Progress, sampler: Sampler, hosted: range, watch: StateWatch) -> Progress:
        """Begin a generation."""

    @abstractmethod
    def begin_step(self, progress: Progress, replica: Replica) -> None:
        """The code of a lane runs from here on."""

    @abstractmethod
    def warning(self) -> str | None:
        """What to warn of, once."""

    @abstractmethod
    def after_step(self, progress: Progress, told: StepCompleted) -> Progress:
        """Have a turn with the result of a step."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation."""

    @abstractmethod
    def after_evaluation(self, progress: Progress) -> Progress:
        """Have a turn with the result of an evaluation."""

    @abstractmethod
    def finish(self) -> None:
        """The job has ended: run to the end."""

    @abstractmethod
    def end_lane(self, lane: int) -> None:
        """A lane has computed its batch."""

    @abstractmethod
    def loop(self, **parts: Any) -> Any:
        """The worker's loop of a generation, which takes turns with this one."""

    @classmethod
    @abstractmethod
    def beside(cls, work: Callable[[], None]) -> None:
        """Do the work of the worker's process, in which this loop will run, too."""
