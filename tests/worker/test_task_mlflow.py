"""What MLflow finds in the environment where the task imports it."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import await_condition
from quorate.spec.tracking import TrackSpec
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER, keep_id, tracking_uri, wish
from quorate.worker import task_mlflow
from quorate.worker.task_mlflow import RUN_ID, URI, mlflow_of_job

TRACK = TrackSpec(mlflow="http://127.0.0.1:5000")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "job")
    (run.path / FOLDER).mkdir()
    return run


@pytest.fixture(autouse=True)
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that keeps what it finds when it is imported."""
    (tmp_path / "mlflow.py").write_text(f"import os\nfound = os.environ.get('{URI}'), os.environ.get('{RUN_ID}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.setenv(URI, "of the user")
    monkeypatch.setenv(RUN_ID, "of somebody else")
    yield
    sys.modules.pop("mlflow", None)


def imported() -> tuple[str | None, str | None]:
    import mlflow  # type: ignore[import-not-found,unused-ignore]

    found: tuple[str | None, str | None] = mlflow.found  # type: ignore[attr-defined,unused-ignore]
    return found


def test_the_run_is_asked_for_where_mlflow_is_imported_and_named_once_it_is_made(run: RunFolder) -> None:
    def make() -> None:
        await_condition("the wish", wish(run).exists)
        keep_id(run, tracking_uri(TRACK, run.path.parent), "abc")

    with mlflow_of_job(TRACK, run):
        assert not wish(run).exists()
        maker = threading.Thread(target=make)
        maker.start()
        assert imported() == (TRACK.mlflow, "abc")
        maker.join()
        del os.environ[RUN_ID]  # as MLflow does, which knows nothing of its run in a fork
        child = os.fork()
        if not child:
            os._exit(os.environ.get(RUN_ID) != "abc")
        assert os.waitpid(child, 0)[1] == 0
    assert (os.environ[URI], os.environ[RUN_ID]) == ("of the user", "of somebody else")


def test_of_a_resumed_run_it_is_known_also_where_the_module_is_imported_already(run: RunFolder) -> None:
    track = TrackSpec(mlflow=True)
    uri = tracking_uri(track, run.path.parent)
    keep_id(run, uri, "abc")
    imported()
    with mlflow_of_job(track, run):
        assert (os.environ[URI], os.environ[RUN_ID]) == (uri, "abc")


def test_where_nobody_makes_it_the_task_goes_on_and_is_warned(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_mlflow, "PATIENCE", 0.0)
    with mlflow_of_job(TRACK, run):
        assert imported() == (TRACK.mlflow, None)
    assert "has no run of this job yet" in caplog.text
