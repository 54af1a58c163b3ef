"""Batch norm by very few samples is warned of when a run begins."""

from typing import Any

import pytest
from torch import nn

from quorate.replica.buffers import notice_of_few_samples
from quorate.spec.job import JobSpec

NORMED = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("model", "keys", "seen"),
    [
        (NORMED, {"batch_size": 31, "lanes": 8}, "3 samples at a time (batch_size 31 / lanes 8)"),
        (NORMED, {"batch_size": 16, "lanes": 4, "accumulate": 4}, "1 sample at a time"),
        (NORMED, {"batch_size": 32, "lanes": 8}, None),
        (NORMED, {"batch_size": 8, "lanes": 4, "strategy": {"kind": "ddp", "sync_batch_norm": True}}, None),
        (nn.Linear(2, 2), {"batch_size": 8, "lanes": 8}, None),
    ],
)
def test_it_says_what_a_lane_has(model: nn.Module, keys: dict[str, Any], seen: str | None) -> None:
    notice = notice_of_few_samples(model, JobSpec.model_validate({"task": "a.b:C", "steps": 1, "workers": 1, **keys}))
    assert (notice is None) == (seen is None)
    assert seen is None or (notice is not None and notice.startswith("batch norm (1) sees ") and seen in notice)
