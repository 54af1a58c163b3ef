"""A FIFO in the place of any file of a run holds nobody up."""

import contextlib
import os
from pathlib import Path

import pytest

from history.run_builder import complete_run
from quorate.api.checkpoints import verify_run
from quorate.api.recorded_run import recorded_environment, recorded_job
from quorate.api.result import open_run
from quorate.api.tasks import find_task
from quorate.core.errors import QuorateError
from quorate.core.task_source import TaskSource
from quorate.history.run_detail import CheckpointList, RunDetail
from quorate.history.run_record import read_runs
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import keep_source
from storage.in_time import in_time


def whole_run(runs: Path) -> RunFolder:
    """A run with every file that one can have."""
    run = complete_run(runs)
    keep_source(run.path, TaskSource("task.py", {"task.py": b"x = 1\n", "parts/net.py": b""}), None)
    run.next_incarnation()
    run.write_address("127.0.0.1:1", "token")
    with run.lock():
        return run


def files_of(run: RunFolder) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


FILES = [
    "checkpoints/step-00000008-evaluated/manifest.json",
    "checkpoints/step-00000008-evaluated/state.safetensors",
    "coordinator.json",
    "coordinators/1",
    "created",
    "environment.json",
    "events.jsonl",
    "job.yaml",
    "lock",
    "result.json",
    "source/index.json",
    "source/parts/net.py",
    "source/task.py",
]


def test_these_are_all(tmp_path: Path) -> None:
    assert files_of(whole_run(tmp_path)) == FILES


@pytest.mark.parametrize("name", FILES)
def test_whoever_reads_it_is_told_at_once(tmp_path: Path, name: str) -> None:
    run = whole_run(tmp_path)
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
    readers = (
        lambda: RunDetail.read(run),
        lambda: read_runs(tmp_path),
        lambda: CheckpointList.read(run),
        lambda: open_run(run.path),
        lambda: recorded_job(run),
        lambda: recorded_environment(run, None),
        lambda: verify_run(run),
        lambda: find_task(run, "/gone/task.py:Tiny"),
        run.next_incarnation,
        run.holder,
        run.lock().__enter__,
    )
    with in_time():
        for read in readers:
            with contextlib.suppress(QuorateError, OSError):
                read()
