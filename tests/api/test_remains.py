"""What is left of a run that did not complete, and the command that goes on with it from where one stands."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quorate.api.recorded_run import remains_of, run_argument, short_path
from quorate.core.failure import Failure
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder

KILLED = Failure("WorkerLost", "worker 1 was killed", step=5)
RAISED = Failure("UserCodeError", "KeyError (in loss())", step=5, traceback="Traceback")
BEFORE = Failure("UserCodeError", "KeyError (in model())", traceback="Traceback", exit_code=2)


def spec(**keys: object) -> JobSpec:
    return JobSpec.model_validate({"task": "a.b:C", "batch_size": 8, "steps": 4, **keys})


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return RunFolder(tmp_path / "runs" / "tiny-0001")


@pytest.fixture
def unsaved(run: RunFolder) -> RunFolder:
    shutil.rmtree(run.checkpoints)
    return run


def test_a_run_goes_on_from_its_newest_checkpoint(run: RunFolder) -> None:
    remains = remains_of(run, spec(), KILLED)
    assert (remains.run, remains.folder, remains.logs) == ("tiny-0001", str(run.path), "runs/tiny-0001/logs")
    assert remains.resume == "quorate resume tiny-0001"
    assert remains.advice == "quorate resume tiny-0001  (resumes from step 8)"
    assert remains_of(run, spec()) == remains, "so does one that was stopped"


@pytest.mark.parametrize("kind", ["UserCodeError", "LossError", "MetricError", "UnsupportedModelError"])
def test_what_would_fail_again_in_the_same_way_goes_on_as_a_branch(run: RunFolder, kind: str) -> None:
    remains = remains_of(run, spec(), replace(RAISED, kind=kind))
    assert remains.resume == "quorate resume tiny-0001 --branch"
    assert remains.advice == f"{remains.resume}  (once it is fixed: resumes from step 8 in a new run)"


@pytest.mark.parametrize(
    ("failure", "every", "advice"),
    [
        (
            KILLED,
            100,
            "train again; no checkpoint was saved yet, so there is nothing to resume (checkpoint.every: 100)",
        ),
        (
            RAISED,
            None,
            "fix it and train again; no checkpoint was saved yet, so there is nothing to resume "
            "(checkpoint.minutes: 10)",
        ),
        (BEFORE, 100, "fix it and train again; nothing was trained yet, so there is nothing to resume"),
        (None, 100, "train again; nothing was trained yet, so there is nothing to resume"),
    ],
)
def test_without_a_checkpoint_there_is_nothing_to_resume(
    unsaved: RunFolder, failure: Failure | None, every: int | None, advice: str
) -> None:
    remains = remains_of(unsaved, spec(checkpoint={"every": every}), failure)
    assert (remains.resume, remains.advice) == (None, advice)


def test_a_run_is_named_by_its_path_where_the_working_folder_is_gone(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert short_path(run.path) == str(run.path)


def test_a_run_elsewhere_is_named_by_its_path(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_argument(RunFolder(run.path.parents[1] / "my runs" / "a-0001")) == "'my runs/a-0001'"
    assert run_argument(RunFolder(Path("/elsewhere/a-0001"))) == "/elsewhere/a-0001"
    monkeypatch.setenv("QUORATE_RUNS", str(run.path.parents[1] / "my runs"))
    assert run_argument(RunFolder(run.path.parents[1] / "my runs" / "a-0001")) == "a-0001"
    assert run_argument(run) == "runs/tiny-0001", "its name is looked for elsewhere"
    monkeypatch.delenv("QUORATE_RUNS")
    monkeypatch.chdir("/")
    assert run_argument(run) == str(run.path).removeprefix("/")
