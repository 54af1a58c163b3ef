"""Distributed PyTorch training that keeps going: the same bits on any number of workers.

The public names are `Task`, `Job`, `Result`, `train`, `resume` and the errors; they are imported when first used, so
that the command line answers without waiting for torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Job": "quorate.api.job",
    "JobFailed": "quorate.core.failure",
    "QuorateError": "quorate.core.errors",
    "RequestError": "quorate.core.errors",
    "Result": "quorate.api.result",
    "Task": "quorate.training.task",
    "resume": "quorate.api.train",
    "train": "quorate.api.train",
}

__all__ = ["Job", "JobFailed", "QuorateError", "RequestError", "Result", "Task", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quorate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
