"""Jobs of which only the numbers matter."""

from collections.abc import Sequence
from typing import Any

import torch

from quorate.data.curriculum import Curriculum, Order
from quorate.spec.job import JobSpec


def job(**keys: Any) -> JobSpec:
    return JobSpec.model_validate({"task": "task.py:Task", **keys})


def shuffled(epoch: int, generator: torch.Generator) -> Sequence[int] | None:
    return None


def curriculum(samples: int, order: Order = shuffled, **keys: Any) -> Curriculum:
    return Curriculum(job(**keys), samples, order)
