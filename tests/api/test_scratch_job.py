"""Jobs beside a run: they use neither its port nor, while it is running, a checkpoint that it may remove."""

import errno
import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from history.run_builder import Story, add_checkpoint, build_run, complete_run
from quorate.api import evaluate
from quorate.api.evaluate import Asked, evaluate_run, hold_checkpoint, replay, run_in_scratch, scratch_folder
from quorate.api.tasks import find_task
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, RequestError, RunError
from quorate.core.failure import JobFailed
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.task.run_mode import RunMode


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return complete_run(tmp_path / "runs")


def newest(run: RunFolder) -> CheckpointInfo:
    return CheckpointFolder(run.checkpoints).list()[-1]


@pytest.mark.parametrize("on_another_disk", [False, True])
def test_a_checkpoint_of_a_running_job_is_kept_from_its_pruning(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_another_disk: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    if on_another_disk:
        monkeypatch.setattr(os, "link", refuse)
    info = newest(run)
    with run.lock():
        path = hold_checkpoint(run, info, tmp_path / "scratch")
    CheckpointFolder(run.checkpoints).remove(info.path)
    (kept,) = CheckpointFolder(path.parent).list()
    CheckpointFolder(path.parent).verify(kept)
    assert kept.manifest == info.manifest


def test_one_of_a_run_that_has_ended_is_read_where_it_is(run: RunFolder, tmp_path: Path) -> None:
    assert hold_checkpoint(run, newest(run), tmp_path / "scratch") == newest(run).path


def test_one_that_is_removed_before_it_is_held_is_chosen_anew(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_checkpoint(run, 9)
    removed = newest(run)
    read = []

    def remove_then_hold(run: RunFolder, info: CheckpointInfo, scratch: Path) -> Path:
        if removed.path.exists():
            CheckpointFolder(run.checkpoints).remove(removed.path)
        return hold_checkpoint(run, info, scratch)

    def note(
        _: Path, __: ResolvedJob, ___: RunMode, path: Path | None, *____: Any, **_____: Any
    ) -> tuple[RunFolder, dict[str, Any]]:
        read.append(path)
        return run, {"final_metrics": {}, "weights_digest": "d"}

    monkeypatch.setattr(evaluate, "hold_checkpoint", remove_then_hold)
    monkeypatch.setattr(evaluate, "run_in_scratch", note)
    with run.lock():
        assert evaluate_run(Asked(tmp_path / "runs", "last", "last", {}, [])).step == 8
        assert [path.name for path in read if path] == [newest(run).path.name]
        with pytest.raises(CheckpointError, match="was removed by the running job"):
            hold_checkpoint(run, removed, tmp_path / "scratch")


def test_one_that_is_gone_is_told_and_the_port_of_the_run_is_left_to_it(
    used_workplace: Workplace, tmp_path: Path
) -> None:
    run = RunFolder(used_workplace.last)
    resolved = load_recorded(run.job_file, {}, [])
    gone = newest(run).path
    shutil.rmtree(gone)
    with socket.create_server(("127.0.0.1", 0)) as server:
        spec = resolved.spec.model_copy(update={"port": server.getsockname()[1]})
        place = find_task(run, spec.task)
        aside, mode = replace(resolved, spec=spec), RunMode(evaluates_only=True)
        with pytest.raises(JobFailed, match="is no longer there: it was removed while this job was starting"):
            run_in_scratch(tmp_path / "scratch", aside, mode, gone, lambda _: None, place)


def test_a_place_where_no_scratch_folder_can_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(RequestError, match=r"No such file.* Choose another with TMPDIR"), scratch_folder():
        raise AssertionError


def test_a_branch_without_a_checkpoint_of_its_own_before_the_step_cannot_be_replayed(tmp_path: Path) -> None:
    branch = build_run(tmp_path, story=Story().begin(from_step=4).train(5, 8))
    add_checkpoint(branch, 8)
    with pytest.raises(RunError, match=r"a branch that began at step 4 .* none of its own before step 6"):
        replay((branch, branch), 6, ({}, {}))
