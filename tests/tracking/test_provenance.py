"""Where a run comes from: parameters, facts, the state of its code, and by what it is known to a server."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER, place, tracking_uri
from quorate.tracking import provenance
from quorate.tracking.mlflow_client import artifact_location, experiment_of, identity, metric_name
from quorate.tracking.provenance import git_state, parameters_of, record, recorded_facts, recorded_git


def spec(folder: Path) -> JobSpec:
    params = {"rate": 0.1, "layers": [1, 2], "deep": {"er": True}}
    return JobSpec(task=f"{folder / 'task.py'}:T", batch_size=8, steps=3, lanes=2, workers=1, params=params)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=folder, check=True)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "tiny")
    (run.path / FOLDER).mkdir()
    return run


def test_parameters_are_what_changes_the_bits_as_a_job_file_has_it(tmp_path: Path) -> None:
    told = parameters_of(spec(tmp_path))
    assert (told["batch_size"], told["params.rate"], told["params.layers"]) == ("8", "0.1", "[1, 2]")
    assert (told["params.deep.er"], told["strategy.kind"], told["deterministic"]) == ("true", "ring", "true")
    assert not {"workers", "runs", "track", "epochs", "name"} & set(told)


def test_code_that_is_in_no_repository_has_no_state(tmp_path: Path) -> None:
    assert git_state(spec(tmp_path)) == provenance.GitState()


def test_the_commit_and_what_was_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task.py").write_text("one = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "task.py")
    git(tmp_path, "commit", "-qm", "first")
    clean = git_state(spec(tmp_path))
    assert len(clean.commit) == 40
    assert clean.diff == ""
    (tmp_path / "task.py").write_text("two = 2\n" * 100)
    assert "+two = 2" in git_state(spec(tmp_path)).diff
    monkeypatch.setattr(provenance, "LONGEST_DIFF", 200)
    assert len(git_state(spec(tmp_path)).diff) < 300
    assert "cut off here" in git_state(spec(tmp_path)).diff


def test_the_run_keeps_the_code_as_it_was_when_it_began(tmp_path: Path, run: RunFolder) -> None:
    assert (recorded_git(run), recorded_facts(run)) == (provenance.GitState(), {})
    (tmp_path / "task.py").write_text("one = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "task.py")
    git(tmp_path, "commit", "-qm", "first")
    record(run, spec(tmp_path))
    first = recorded_git(run)
    (tmp_path / "task.py").write_text("two = 2\n")
    record(run, spec(tmp_path))
    assert recorded_git(run) == first == provenance.GitState(first.commit, "")
    assert recorded_facts(run)["quorate.workers"] == "1"


def test_a_run_is_known_by_its_name_and_the_moment_of_its_creation(run: RunFolder, tmp_path: Path) -> None:
    known = identity(run)
    (run.path / FOLDER / "id").unlink()
    assert identity(run) == known, "it can be made again"
    other = RunFolder.create(tmp_path / "elsewhere", "tiny")
    assert identity(other) != known
    moved = RunFolder(tmp_path / "renamed")
    run.path.rename(moved.path)
    assert identity(moved) == known, "what is kept counts"


def test_where_a_job_is_tracked(tmp_path: Path) -> None:
    own = tracking_uri(TrackSpec(mlflow=True), tmp_path)
    assert own == f"sqlite:///{tmp_path}/mlflow.db"
    assert artifact_location(own) == (tmp_path / "mlflow-artifacts").as_uri()
    assert tracking_uri(TrackSpec(mlflow="http://127.0.0.1:5000"), tmp_path) == "http://127.0.0.1:5000"
    assert artifact_location("http://127.0.0.1:5000") is None
    assert place("http://me:secret@127.0.0.1:5000") == "http://…@127.0.0.1:5000"


@pytest.mark.parametrize(
    ("name", "taken"),
    [("train/loss", "train/loss"), ("train/a b?", "train/a b_"), ("train//x", "train/x"), ("../x", "x"), ("", "_")],
)
def test_names_as_mlflow_takes_them(name: str, taken: str) -> None:
    assert metric_name(name) == taken
    assert len(metric_name(name + 1000 * "y")) <= 250


def test_the_experiment_is_the_jobs_own_the_variables_or_of_the_jobs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    job: dict[str, Any] = {"task": "task.py:T", "name": "tiny", "batch_size": 8, "steps": 3}
    assert experiment_of(JobSpec(**job)) == "tiny"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "shared")
    assert experiment_of(JobSpec(**job)) == experiment_of(JobSpec(**job, track=TrackSpec(mlflow=True))) == "shared"
    assert experiment_of(JobSpec(**job, track=TrackSpec(mlflow=True, experiment="own"))) == "own"
