"""A job in Python: the job file's keys as keyword arguments."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quorate.core.errors import TaskError
from quorate.spec.job import JobSpec
from quorate.spec.load import load_job, resolve_mapping
from quorate.spec.override import Override
from quorate.spec.resolved import ResolvedJob


class Job:
    """One training run of a task.

    ::

        job = quorate.Job(task=Digits, lanes=4, batch_size=64, epochs=3)
        result = quorate.train(job)

    Keys are those of the job file, and are checked in the same way; `task` may be the class itself.
    """

    def __init__(self, task: Any, **keys: Any) -> None:
        reference = task if isinstance(task, str) else reference_to(task)
        name = reference.rpartition(":")[2].lower()
        self.resolved: ResolvedJob = resolve_mapping(
            {"name": name, "task": reference, **keys}, "Job(...)", os.environ, overrides=()
        )

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "Job":
        """The job of a file; `overrides` (dotted keys) go over it."""
        job = cls.__new__(cls)
        layer = [Override(key, value, "Job.from_file") for key, value in (overrides or {}).items()]
        job.resolved = load_job(Path(path), os.environ, layer)
        return job

    @property
    def spec(self) -> JobSpec:
        """The job's keys with their values."""
        return self.resolved.spec

    def __repr__(self) -> str:
        return f"Job({self.spec.name}: {self.spec.task}, lanes={self.spec.lanes})"


def reference_to(task: Any) -> str:
    """How another process finds a task class: by its file or by its module."""
    if not isinstance(task, type):
        raise TaskError(f"task: {task!r} is not a class. Give the class itself, such as task={type(task).__name__}.")
    if "<locals>" in task.__qualname__:
        raise TaskError(
            f"task: {task.__qualname__} is defined inside a function, where workers cannot find it. "
            "Define it at the top of a module."
        )
    if task.__module__ != "__main__":
        return f"{task.__module__}:{task.__qualname__}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        raise TaskError(
            f"task: {task.__name__} is defined in a notebook or an interactive session, which workers cannot import. "
            f"Write it to a file (in a notebook: begin its cell with `%%writefile {task.__name__.lower()}.py`), "
            f"and use `from {task.__name__.lower()} import {task.__name__}`."
        )
    return f"{Path(file).resolve()}:{task.__qualname__}"
