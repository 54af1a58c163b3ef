"""Where the runs of a job lie, from wherever it is started, and where they are looked for."""

import os
from pathlib import Path

import pytest

from quorate.core.runs_folder import runs_folder, runs_of_job


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job below it, and another one elsewhere; this is the working folder."""
    for name in ("project/mine", "project/other", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.delenv("QUORATE_RUNS", raising=False)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def with_a_run(folder: Path) -> Path:
    run = folder / "runs" / "mine-0001"
    run.mkdir(parents=True)
    (run / "created").touch()
    return folder / "runs"


PLACES = ["project", "project/mine", "project/other", "elsewhere", "."]


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("later", PLACES)
def test_runs_lie_in_one_place_wherever_a_job_is_started(
    first: str, later: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent / first)
    made = with_a_run(runs_of_job(project / "mine").absolute().parent)
    monkeypatch.chdir(project.parent / later)
    assert runs_of_job(project / "mine").absolute() == made
    assert runs_of_job(Path(os.path.relpath(project / "mine"))).absolute() == made


def test_the_first_run_is_in_the_working_folder_if_the_job_is_there_or_below_and_otherwise_beside_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_of_job(project / "mine") == Path("runs")
    assert runs_of_job(project) == Path("runs")
    monkeypatch.chdir(project.parent / "elsewhere")
    assert runs_of_job(project / "mine") == project / "mine" / "runs"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert runs_of_job(project / "mine") == Path("runs")


def test_a_job_may_lie_behind_a_link(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "link").symlink_to(project.parent / "elsewhere")
    assert runs_of_job(Path("link")) == Path("runs")
    monkeypatch.chdir(project / "link")
    assert runs_of_job(project / "link") == Path("runs")
    made = with_a_run(project.parent)
    assert runs_of_job(Path()) == made


def test_others_folders_are_not_for_ones_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_a_run(project)
    monkeypatch.chdir(project.parent / "elsewhere")
    monkeypatch.setattr(os, "getuid", lambda: os.stat(project).st_uid + 1)  # noqa: PTH116
    assert runs_of_job(project / "mine") == Path("runs")


def test_runs_are_looked_for_here_then_above_and_then_in_the_only_folder_below(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_folder() == Path("runs")
    below = with_a_run(project / "mine")
    assert runs_folder().absolute() == below
    with_a_run(project / "other")
    assert runs_folder() == Path("runs"), "of two below none is meant"
    above = with_a_run(project.parent)
    assert runs_folder() == above
    with_a_run(project)
    assert runs_folder() == Path("runs")
