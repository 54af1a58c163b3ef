"""How long a job is, for a task that asks in schedule()."""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch.utils.data import Dataset as TorchDataset

from quorate.core.digests import derive_seed
from quorate.core.errors import TaskError
from quorate.data.datasets import refuse_unpaired
from quorate.data.sampler import steps_in
from quorate.data.streams import preserved_generators, seed_generators
from quorate.spec.job import JobSpec
from quorate.training.task import LENGTH, Task


@contextlib.contextmanager
def knowing_length(task: Task, spec: JobSpec) -> Iterator[None]:
    """In this block the task may ask for `self.total_steps` and `self.steps_per_epoch`."""
    vars(task)[LENGTH] = _Length(task, spec)
    try:
        yield
    finally:
        del vars(task)[LENGTH]  # what a task keeps is looked at in every step


class _Length:
    """The training set is asked for its length only where that is needed: to make it may take long."""

    def __init__(self, task: Task, spec: JobSpec) -> None:
        self._task, self._spec = task, spec

    @cached_property
    def steps_per_epoch(self) -> int:
        if getattr(self._task.order, "__func__", None) is not Task.order:
            raise TaskError(
                "Where order() chooses the samples, schedule() cannot know how many steps an epoch has: give the job "
                "`steps` instead of `epochs`."
            )
        with preserved_generators():
            seed_generators(derive_seed(self._spec.seed, "datasets"))
            return steps_in(self._spec, len(sets_of(self._task.datasets())[0]))

    @property
    def total_steps(self) -> int:
        return self._spec.steps or self.steps_per_epoch * (self._spec.epochs or 0)


def sets_of(given: Any) -> tuple[Any, ...]:
    """What datasets() has returned, the training set first. random_split gives a list; a list of anything but datasets
    is a dataset itself."""
    refuse_unpaired(given)
    of_sets = isinstance(given, list) and bool(given) and all(isinstance(d, TorchDataset) for d in given)
    return tuple(given) if isinstance(given, tuple) or of_sets else (given,)
