"""Watching for state that would cross from one lane to the next behind our back.

Which lanes share a process depends on the number of workers. What a lane leaves behind in the model or the task, other
than buffers and gradients, would therefore make the result depend on it.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from quorate.core.digests import content_digest
from quorate.core.errors import UnsupportedModelError
from quorate.training.replica import Replica, changed_outside
from quorate.training.task import Task
from quorate.training.tensors import digests

_OWN = frozenset({"training"})


class StateWatch:
    """Compares, around the lanes of a worker, what should not change.

    Parameters by their version at every lane, and by their bits at the first, since some writes do not raise the
    version. Plain numbers and random generators on the task and its modules after the first and after the second lane:
    a cache is filled once, a counter goes on. A number whose name begins with an underscore is not looked at.
    """

    def __init__(self, task: Task, replica: Replica) -> None:
        self._task = task
        self._replica = replica
        self._versions: list[int] = []
        self._digests: dict[str, str] = {}
        self._kept: dict[str, Any] = {}
        self._lanes = 0

    def before_lane(self) -> None:
        """A lane begins."""
        self._versions = self._replica.versions()
        if self._lanes == 0:
            self._digests = digests(self._replica.parameters)

    def after_lane(self) -> None:
        """A lane has ended."""
        self._replica.check_unchanged(self._versions, "loss()")
        self._lanes += 1
        if self._lanes == 1:
            self._compare_bits()
            self._kept = dict(self._what_is_kept())
        elif self._lanes == 2:
            self._compare_kept()

    def _compare_bits(self) -> None:
        after = digests(self._replica.parameters)
        for name, digest in self._digests.items():
            if after[name] != digest:
                raise changed_outside(name, "loss()")

    def _compare_kept(self) -> None:
        for name, value in self._what_is_kept():
            if self._kept.get(name, value) != value:
                raise UnsupportedModelError(f"'{name}' changes from lane to lane. {_advice(self._kept[name], value)}")

    def _what_is_kept(self) -> Iterator[tuple[str, Any]]:
        yield from _kept_by(self._task, "self")
        for path, module in self._replica.model.named_modules():
            yield from _kept_by(module, path or "model")


def _kept_by(owner: object, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if isinstance(value, bool | int | float) and not name.startswith("_") and name not in _OWN:
            yield f"{path}.{name}", value
        elif (state := _generator_state(value)) is not None:
            yield f"{path}.{name}", state


def _generator_state(value: object) -> str | None:
    """What a random generator will draw next, as text; None for anything else."""
    if isinstance(value, torch.Generator):
        return content_digest(value.get_state().numpy().tobytes())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    return repr(value.getstate()) if isinstance(value, random.Random) else None


def _advice(before: object, after: object) -> str:
    depends = "What one lane leaves for the next would make the result depend on the number of workers."
    if isinstance(after, str):
        return (
            f"{depends} Draw from the global generators of torch, NumPy or Python: each lane has its own stream there."
        )
    return (
        f"It was {before!r} and is {after!r}. {depends} Make it a buffer of the model; or, if it does not influence "
        "the loss, begin its name with an underscore."
    )
