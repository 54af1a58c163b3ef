"""Distributed PyTorch training that keeps going: the same bits on any number of workers.

::

    job = quorate.Job(task=Digits, lanes=4, batch_size=64, epochs=3)
    result = quorate.train(job)
    model = result.load_model()

`Task` is what you write, `Job` is a task with the keys to train it. `train`, `resume` and `evaluate` run jobs, and
`open_run` opens an existing run. `launch` runs a training loop of your own on many workers. `tune` runs a `Search`
for the best values of a job's keys. `warm` makes many short runs start fast. `Shards` reads data that do not fit into
memory, `Stream` what can only be read in order. `attention` is fast and deterministic on GPUs. `RequestError` and
`JobFailed` are the errors to expect, and `QuorateError` is the base of both. `quorate.ray.trainer` is for programs
that use Ray Train. All names are imported when first used, so that the command line answers without waiting for
torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Callback": "quorate.api.callbacks",
    "Evaluation": "quorate.api.evaluate",
    "Job": "quorate.api.job",
    "JobFailed": "quorate.core.failure",
    "JobFileError": "quorate.core.errors",
    "QuorateError": "quorate.core.errors",
    "RequestError": "quorate.core.errors",
    "Result": "quorate.api.result",
    "RunError": "quorate.core.errors",
    "Search": "quorate.tune.search",
    "SearchResult": "quorate.tune.result",
    "Shards": "quorate.shards.dataset",
    "Stream": "quorate.data.stream",
    "Task": "quorate.task.task",
    "TaskError": "quorate.core.errors",
    "attention": "quorate.cuda.attention",
    "evaluate": "quorate.api.evaluate",
    "launch": "quorate.api.train",
    "open_run": "quorate.api.result",
    "open_search": "quorate.tune.result",
    "resume": "quorate.api.train",
    "train": "quorate.api.train",
    "warm": "quorate.api.warm",
}

__all__ = [
    "Callback",
    "Evaluation",
    "Job",
    "JobFailed",
    "JobFileError",
    "QuorateError",
    "RequestError",
    "Result",
    "RunError",
    "Search",
    "SearchResult",
    "Shards",
    "Stream",
    "Task",
    "TaskError",
    "attention",
    "evaluate",
    "launch",
    "open_run",
    "open_search",
    "resume",
    "train",
    "tune",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in ("ray", "tune"):
        return import_module(f"quorate.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'quorate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    # Here, because reading the metadata takes longer than `import quorate`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quorate")
    except PackageNotFoundError:
        raise AttributeError("the version of quorate is not known: it is not installed") from None
