"""A job in Python: the job file's keys as keyword arguments."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, TypedDict, Unpack

from quorate.core.errors import RequestError, TaskError
from quorate.core.user_code import given, is_installed
from quorate.spec.job import JobSpec
from quorate.spec.load import load_job, name_from, resolve_mapping
from quorate.spec.override import Layers, Override
from quorate.spec.resolved import ResolvedJob, dump_job

REPLACED = "Job.replace"

Section = Mapping[str, Any]
Code = type | FunctionType
"""What trains: a task, or a function that has a training loop of its own."""


class JobKeys(TypedDict, total=False):
    """What `Job` takes besides its task: the keys of the job file, with the types that they have in Python."""

    version: Literal[1, 2]
    name: str
    params: Section
    lanes: int
    threads: int
    batch_size: int | Literal["auto"]
    epochs: int | None
    steps: int | None
    seed: int
    accumulate: int
    clip_norm: float | None
    schedule: Section | None
    average: Section | None
    last_batch: Literal["drop", "keep"]
    evaluate: Section
    early_stop: Section | None
    lineage: Sequence[Section]
    on_nonfinite_loss: Literal["fail", "skip"]
    on_out_of_memory: Literal["fail", "shrink"]
    on_bad_sample: Literal["fail", "skip"]
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    loss_scale: Section
    compile: bool | Literal["auto"]
    memory: Section
    deterministic: bool
    bucket_mb: float
    strategy: str | Section
    workers: int | Literal["auto"]
    min_workers: int
    spares: int
    engine: str | Section
    failure_timeout: float
    step_timeout: float | None
    setup_timeout: float | None
    balance: Literal["even", "speed"]
    runs: str
    share: Literal["group"] | None
    checkpoint: Section
    loader_workers: int
    loader_prefetch: int
    links: Literal["auto", "tcp"]
    encrypt: bool | Literal["auto"]
    capture: bool
    overlap: bool
    nccl: Section
    reuse: bool | None
    check_gradients: Section | None
    audit: Section
    record: Literal["lanes", "tensors"] | None
    track: Section | None
    notify: Section | None
    callbacks: Sequence[str]
    train_metrics_every: int | None
    port: int
    log_level: Literal["debug", "info", "warning", "error"]


class Job:
    """A job: a task and the keys with which to train it.

    ::

        job = quorate.Job(task=Digits, lanes=4, batch_size=64, epochs=3)
        result = quorate.train(job)
        again = quorate.train(job.replace(seed=8))

    The keys are those of the job file and are checked in the same way; a section is a mapping:
    ``checkpoint={"every": 50}``. `task` is the class itself, ``"file.py:Class"`` or ``"package.module:Class"``, or in
    the same forms a function with a training loop of its own (`quorate.launch`). Environment variables that begin with
    ``QUORATE_`` override the keys. Two jobs with equal keys are equal.
    """

    def __init__(self, task: Any, **keys: Unpack[JobKeys]) -> None:
        reference = reference_to(task)
        mapping = {"name": _name_from(reference), "task": reference, **keys}
        self.resolved: ResolvedJob = resolve_mapping(mapping, "Job(...)", os.environ, overrides=())
        self.task_type: Code | None = task if isinstance(task, Code) else None

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "Job":
        """Read a job file. `overrides` (dotted keys, such as ``"checkpoint.every"``) override its keys."""
        layer = [Override(key, value, "Job.from_file") for key, value in (overrides or {}).items()]
        return cls.of(load_job(Path(path), os.environ, layer), None)

    @classmethod
    def of(cls, resolved: ResolvedJob, task_type: Code | None = None) -> "Job":
        """A job that was resolved already."""
        job = cls.__new__(cls)
        job.resolved, job.task_type = resolved, task_type
        return job

    @property
    def spec(self) -> JobSpec:
        """All keys of the job with their values."""
        return self.resolved.spec

    def replace(self, **keys: Any) -> "Job":
        """Return a copy of the job with other values for some keys, which are checked. This job is not changed.

        ::

            job.replace(seed=8, workers=3)
            job.replace(checkpoint__every=50)          # one key of a section: two underscores, as in QUORATE_ variables
            job.replace(checkpoint={"every": 50})      # the whole section: keys left out get their defaults
            job.replace(steps=100)                     # replaces epochs, and the reverse

        `task` may be replaced too. A key may also be written with dots: ``replace(**{"checkpoint.every": 50})``.
        """
        task_type = self.task_type
        said = {key if "." in key else key.replace("__", "."): value for key, value in keys.items()}
        if "task" in said:
            task = said["task"]
            task_type = task if isinstance(task, Code) else None
            said["task"] = reference_to(task)
            if self.spec.name == _name_from(self.spec.task):
                said.setdefault("name", _name_from(said["task"]))
        before, overrides = self.spec.model_dump(), [Override(key, value, REPLACED) for key, value in said.items()]
        # Not under the environment once more: what is replaced in Python is said later than that.
        spec = resolve_mapping(before, f"{REPLACED}(...)", {}, overrides).spec
        origins = Layers(before, self.resolved.origins).under(overrides).origins_of(spec.model_dump())
        return self.of(ResolvedJob(spec, origins, f"{REPLACED}(...)"), task_type)

    def _spelled(self) -> str:
        # As text: Python holds 1, 1.0 and True for equal; a task may not.
        return json.dumps(self.spec.model_dump(), sort_keys=True)

    def __eq__(self, other: object) -> bool:
        return self._spelled() == other._spelled() if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._spelled())

    def __repr__(self) -> str:
        """The task, and every key that is not at its default."""
        keys = {"task": self.spec.task, **self.spec.model_dump(exclude={"task"}, exclude_defaults=True)}
        return f"Job({', '.join(f'{key}={value!r}' for key, value in keys.items())})"


def reference_to(task: Any) -> str:
    """How another process finds a task: by its file or, inside a package, by its module; a text is taken as it is."""
    if isinstance(task, str):
        return task
    is_in_class = isinstance(task, FunctionType) and "." in task.__qualname__ and "<locals>" not in task.__qualname__
    if is_in_class or (callable(task) and not isinstance(task, Code)):
        raise TaskError(
            f"task: {given(task)}, a method or an object, is nothing that workers could find by a name. Write "
            "`def main(run, learning_rate: float = 0.1):` at the top of a module, which calls it; `params` sets what "
            "`main` takes besides `run`."
        )
    if not isinstance(task, Code):
        raise TaskError(f"task: {task!r} is not a class. Give the class itself, such as task={type(task).__name__}.")
    if task.__name__ == "<lambda>":
        raise TaskError("task: a lambda has no name by which workers could find it. Write `def main(run):`.")
    if "<locals>" in task.__qualname__:
        raise TaskError(
            f"task: {task.__qualname__} is defined inside a function, where workers cannot find it. "
            "Define it at the top of a module."
        )
    module = sys.modules.get(task.__module__)
    file = getattr(module, "__file__", None)
    if task.__module__ == "__main__" and (file is None or not Path(file).is_file()):
        raise TaskError(
            f"task: {task.__name__} is defined in a notebook or an interactive session, which workers cannot import. "
            f"Write it to a file (in a notebook: begin its cell with `%%writefile {task.__name__.lower()}.py`), "
            f"and use `from {task.__name__.lower()} import {task.__name__}`."
        )
    # By its file, the job can be resumed from anywhere. A package and its modules can only be imported by their names.
    in_package = "." in task.__module__ or hasattr(module, "__path__")
    if file is not None and file.endswith(".py") and not in_package and not is_installed(file):
        return f"{Path(file).resolve()}:{task.__qualname__}"
    return f"{task.__module__}:{task.__qualname__}"


def overrides_from(caller: str, keys: Mapping[str, Any] | None, task: Any = None) -> list[Override]:
    """What a call puts over a recorded job: keys, and where the task is now."""
    said = dict(keys or {}) if task is None else {**(keys or {}), "task": reference_to(task)}
    return [Override(key, value, caller) for key, value in said.items()]


def _name_from(reference: str) -> str:
    """What a job is called that has no name: as its task, or as the script of its training loop, which is most often
    called `main`."""
    place, _, name = reference.rpartition(":")
    if not name[:1].islower():
        return name.lower()
    return name_from(Path(re.split(r"[/.]", place.removesuffix(".py"))[-1]), "job")


def job_text(resolved: ResolvedJob) -> str:
    """The content of a run's `job.yaml`; refused if it could not be read again."""
    # YAML is UTF-8, and a path of Linux may be anything: the run would pass for damaged as soon as it had ended.
    for key, value in {**resolved.spec.model_dump(), "job file": resolved.source}.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{key}: {value!r} is not UTF-8, which a run needs to keep its job. Rename that folder or file."
            ) from None
    return dump_job(resolved)
