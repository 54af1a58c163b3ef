"""Jobs of which only the numbers matter."""

from collections.abc import Sequence
from typing import Any

import torch

from quorate.data.sampler import LaneSampler, Order
from quorate.spec.job import JobSpec


def job(**keys: Any) -> JobSpec:
    return JobSpec.model_validate({"task": "task.py:Task", **keys})


def shuffled(epoch: int, generator: torch.Generator) -> Sequence[int] | None:
    return None


def sampler(samples: int, order: Order = shuffled, **keys: Any) -> LaneSampler:
    return LaneSampler(job(**keys), samples, order)
