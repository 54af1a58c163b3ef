"""A run in parts, each of which ends after a given step, gives the bits of one that was trained at a stretch."""

from pathlib import Path
from typing import Any

import pytest

import gang
from bits import bit_tasks as tasks
from quorate.checkpoint.store import CheckpointFolder
from quorate.task.run_mode import RunMode

pytestmark = pytest.mark.usefixtures("unmeasured")

KEYS: dict[str, Any] = {"schedule": {"kind": "cosine", "warmup": 2}, "evaluate": {"every": 2}}
SERVERS = {"kind": "parameter-server", "servers": 2}
BOUNDED = {"kind": "parameter-server", "servers": 2, "mode": "bounded", "staleness": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [({"kind": "ring"}, 1), ({"kind": "ring"}, 3), (SERVERS, 2), (BOUNDED, 1)],
    ids=["ring-1", "ring-3", "servers-2", "bounded-1"],
)
def test_parts_that_end_after_a_step_make_up_the_whole(strategy: dict[str, Any], workers: int, tmp_path: Path) -> None:
    task = tasks.BatchNormAndDropout if strategy != BOUNDED else tasks.Regression
    spec = gang.job(task, **KEYS, strategy=strategy)
    (whole := tmp_path / "whole").mkdir()
    (parts := tmp_path / "parts").mkdir()
    digest = gang.train(task, spec, workers, whole).digest
    # In the middle between two evaluations, at one, and once more: there is nothing to do then.
    for until in (3, 4, 4):
        part = gang.train(task, spec, workers, parts, mode=RunMode(until=until))
        assert (part.ending, part.progress["cursor"]) == ("paused", [until, until % 2 == 0])
        newest = CheckpointFolder(parts / "checkpoints").search().newest
        assert newest is not None
        assert newest.cursor.step == until
        assert part.digest != digest
    last = gang.train(task, spec, workers, parts, mode=RunMode(until=99))
    assert (last.ending, last.digest) == ("complete", digest)
