"""What `quorate tune` refuses before any trial begins."""

from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from quorate.cli.app import app
from quorate.core.errors import RequestError, RunError
from quorate.tune.folder import SearchFolder
from tune.search_builder import search_folder

TASK = """
import quorate
class Tiny(quorate.Task):
    learning_rate: float = 0.1
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
"""
JOB = "name: tiny\ntask: task.py:Tiny\nlanes: 1\nbatch_size: 8\nsteps: 4\n"


SEARCH = "job: job.yaml\nbudget: {trials: 2}\nspace: {params.learning_rate: {uniform: [0, 1]}}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a task, a job and a search."""
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK)
    Path("job.yaml").write_text(JOB)
    Path("search.yaml").write_text(SEARCH)
    return tmp_path


def begun(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> SearchFolder:
    """The folder of a search that is not run."""
    folders: list[SearchFolder] = []

    def run(_: object, folder: SearchFolder, *__: object) -> NoReturn:
        folders.append(folder)
        raise RunError("enough")

    monkeypatch.setattr("quorate.tune.search.run", run)
    assert refusal("search.yaml", *arguments).message == "enough"
    return folders[0]


def refusal(*arguments: object) -> RequestError:
    done = CliRunner().invoke(app, ["tune", *(str(each) for each in arguments)])
    assert isinstance(done.exception, RequestError), done.output
    return done.exception


def test_it_needs_either_a_file_or_a_search() -> None:
    assert "search file, or --resume" in refusal().message
    assert "search file, or --resume" in refusal("search.yaml", "--resume", "last").message


def test_a_search_that_goes_on_is_not_changed(tmp_path: Path) -> None:
    search_folder(tmp_path)
    told = refusal("--resume", "last", "--runs", tmp_path, "--set", "budget.trials=9")
    assert "--set changes a search before it begins" in told.message
    assert isinstance(refusal("--resume", "nothing", "--runs", tmp_path), RunError)


def test_a_proposed_space_is_shown_and_not_searched_where_nobody_can_agree(project: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "job.yaml"])
    assert "params.learning_rate: {loguniform: " in done.stderr
    assert isinstance(done.exception, RequestError) and "--yes" in done.exception.message
    assert not SearchFolder.all_in(project / "runs")


def test_a_search_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = search_folder(tmp_path).folder
    with folder.lock():
        assert "is in use" in refusal("--resume", folder.path).message


def test_a_new_search_is_in_the_folder_that_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun(monkeypatch).path == project / "runs" / "tiny-search-0001"
    monkeypatch.setenv("QUORATE_RUNS", "mine")
    assert begun(monkeypatch).path == project / "mine" / "tiny-search-0001"
    assert begun(monkeypatch, "--set", "runs=other").path == project / "other" / "tiny-search-0001"
    assert begun(monkeypatch, "--runs", "12", "--set", "runs=other").path == project / "12" / "tiny-search-0001"


def test_a_job_with_a_secret_is_kept_for_its_owner_only(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun(monkeypatch).job_file.stat().st_mode & 0o077
    (project / "job.yaml").write_text(f"{JOB}notify: {{webhook: 'https://example.org/hook?token=c0ffee42c0ffee42'}}\n")
    private = begun(monkeypatch).job_file
    assert "c0ffee42" in private.read_text() and not private.stat().st_mode & 0o077
