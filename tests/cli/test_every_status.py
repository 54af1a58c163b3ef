"""Every status that a run can have, in every view that shows one; and a folder with a run that cannot be read."""

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from history.run_builder import COMPLETE, Story, build_run, complete_run
from quorate.api.result import EXIT_CODES, open_run
from quorate.cli.app import app
from quorate.history.run_record import RunRecord, Status
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import Submission
from schemas import validate


class WaitingJobs:
    """In the place of Ray's client: each job waits for room."""

    def get_job_info(self, _: str) -> Any:
        return SimpleNamespace(status=SimpleNamespace(value="PENDING"), message="")

    def stop_job(self, _: str) -> None: ...


def ended(runs: Path, status: str) -> RunFolder:
    return build_run(runs, story=Story().begin().train(1, 5), result={**COMPLETE, "status": status, "steps": 5})


def submitted(runs: Path) -> RunFolder:
    run = build_run(runs)
    Submission("tiny-0001-ab", "auto").write(run)
    return run


def damaged(runs: Path) -> RunFolder:
    run = complete_run(runs)
    run.job_file.write_text("a: [")
    return run


RUNS: dict[Status, Callable[[Path], RunFolder]] = {
    Status.RUNNING: lambda runs: build_run(runs, story=Story().begin().train(1, 5)),
    Status.SUBMITTED: submitted,
    Status.FAILED: lambda runs: ended(runs, "failed"),
    Status.LOST: lambda runs: build_run(runs, story=Story().begin().train(1, 5)),
    Status.DAMAGED: damaged,
    Status.INTERRUPTED: lambda runs: ended(runs, "interrupted"),
    Status.TERMINATED: lambda runs: ended(runs, "terminated"),
    Status.COMPLETE: complete_run,
}


def type_in(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ImportError):  # without the option no run is submitted
        monkeypatch.setattr("quorate.engines.ray.jobs.jobs_at", lambda _: WaitingJobs())
    return tmp_path


@pytest.mark.parametrize("status", list(Status))
def test_is_shown_by_every_view(here: Path, status: Status) -> None:
    run = RUNS[status](here / "runs")
    held: AbstractContextManager[None] = run.lock() if status is Status.RUNNING else contextlib.nullcontext()
    with held:
        assert RunRecord.read(run).status is status
        assert status.value in type_in("runs")
        assert status.value in type_in("runs", "--status", status.value, "--sort", "status")
        for verb, options in {"runs": [], "show": ["last"], "top": ["last"]}.items():
            document = json.loads(type_in(verb, *options, "--json"))
            validate(verb, document)
            assert (document["runs"][0] if verb == "runs" else document)["status"] == status.value
        assert status.value in type_in("show", "last")
        assert status.value in type_in("top", "last", "--once")
        type_in("logs", "last")
        type_in("report", "last")
        page = (here / "tiny-0001.html").read_text()
        assert f'class="status {status.value}"' in page
        assert f".status.{status.value}" in page, "it has a colour"
        result = open_run("last")
        if status is not Status.DAMAGED:  # its result is whole, and says how it ended
            assert result.status == status.value
            assert status.value in result._repr_html_()
            assert (result.exit_code == 0) is (status.value not in EXIT_CODES)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.RUNNING])
def test_is_named_by_stop(here: Path, status: Status) -> None:
    run = RUNS[status](here / "runs")
    done = CliRunner().invoke(app, ["stop", "last"])
    if status is Status.SUBMITTED:
        assert done.stdout == "tiny-0001 is interrupted, before anything was saved.\n"
        assert RunRecord.read(run).status is Status.INTERRUPTED
    else:
        told = "complete" if status is Status.DAMAGED else status.value
        assert f"run tiny-0001 is not running ({told})" in str(done.exception)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((name, None) for name in ("job.yaml", "result.json", "events.jsonl", "lock", "submission.json")),
        *((name, b"\xff[{") for name in ("job.yaml", "result.json", "submission.json")),
        ("submission.json", b"[]"),
        ("submission.json", b'{"id": "x"}'),
    ],
)
def test_one_that_cannot_be_read_is_a_line_that_says_why(here: Path, file: str, content: bytes | None) -> None:
    complete_run(here / "runs")
    other = build_run(here / "runs", result=None if file == "submission.json" else COMPLETE, after=60)
    (other.path / file).unlink(missing_ok=True)
    if content is None:
        (other.path / file).mkdir()
    else:
        (other.path / file).write_bytes(content)
    lines = type_in("runs").splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["tiny-0002", "damaged"], ["tiny-0001", "complete"]]
    assert file in "".join(lines[3:])
    type_in("show", "tiny-0002")
    type_in("top", "--once")


def test_what_nobody_foresaw_hides_no_other_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete_run(here / "runs")
    complete_run(here / "runs", after=60)
    read = RunFolder.read_result

    def broken(run: RunFolder) -> dict[str, Any] | None:
        if run.name == "tiny-0002":
            raise OSError("Stale file handle")
        return read(run)

    monkeypatch.setattr(RunFolder, "read_result", broken)
    lines = type_in("runs").splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["tiny-0002", "damaged"], ["tiny-0001", "complete"]]
    assert "tiny-0002 is damaged: it cannot be read: OSError: Stale file handle" in lines[3]
