"""What `quorate tune` refuses before it asks Ray for anything."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from history.search_builder import search_folder
from quorate.cli.app import app
from quorate.core.errors import RequestError, RunError
from quorate.storage.search_folder import SearchFolder

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


def test_a_proposed_space_is_shown_and_not_searched_where_nobody_can_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK)
    Path("job.yaml").write_text(JOB)
    done = CliRunner().invoke(app, ["tune", "job.yaml"])
    assert "params.learning_rate: {loguniform: " in done.stderr
    assert isinstance(done.exception, RequestError) and "--yes" in done.exception.message
    assert not SearchFolder.all_in(tmp_path / "runs")


def test_a_search_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = search_folder(tmp_path).folder
    with folder.lock():
        assert "is in use" in refusal("--resume", folder.path).message
