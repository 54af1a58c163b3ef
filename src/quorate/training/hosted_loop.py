"""What a worker asks of a task that has the training loop itself."""

from abc import abstractmethod
from collections.abc import Callable

from quorate.data.sampler import Sampler
from quorate.spec.job import JobSpec
from quorate.training.progress import Progress
from quorate.training.task import Task


class HostedLoop(Task):
    """A task whose code runs from one step to the next, beside the loop of the worker (`own_loop`)."""

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

    @classmethod
    @abstractmethod
    def beside(cls, work: Callable[[], None]) -> None:
        """Do the work of the worker's process, in which this loop will run, too."""
