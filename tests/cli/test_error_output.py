import json
import re
import sys
from typing import Any

import pytest

import schemas
from quorate.cli.errors import show_error
from quorate.core.errors import JobError, JobFileError, OutputError, Problem, QuorateError, RunError
from quorate.core.failure import Failure, JobFailed, Remains

REMAINS = Remains("tiny-0001", "/w/runs/tiny-0001", "runs/tiny-0001/logs", "quorate resume tiny-0001", "resume it")


def document(told: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(told)
    schemas.validate("error", fields)
    return fields


def test_a_failed_job_is_told_to_people_and_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("UserCodeError", "worker 1: no", worker=1, traceback="Traceback: a line")
    assert show_error(JobFailed(failure, REMAINS), as_json=True) == 1
    told = capsys.readouterr()
    assert told.err == ("error: worker 1: no\n\nTraceback: a line\n\nnext: resume it\nlogs: runs/tiny-0001/logs\n")
    assert document(told.out) == {
        "status": "failed",
        "exit_code": 1,
        "error": "worker 1: no",
        "run": "tiny-0001",
        "folder": "/w/runs/tiny-0001",
        "resume": "quorate resume tiny-0001",
        "failure": failure.to_dict(),
    }


def test_an_error_cannot_colour_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(JobError("red: \x1b[31m, null: \x00"), as_json=False)
    assert capsys.readouterr().err.startswith("error: red: \\x1b[31m, null: \\x00\n")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (Failure("Interrupted", "stopped at once", exit_code=130), "interrupted", 130),
        (Failure("Interrupted", "stopped at once", exit_code=143), "terminated", 143),
        (Failure("UserCodeError", "no (in model())", traceback="Traceback", exit_code=2), "failed", 2),
        (Failure("WorkerLost", "killed"), "failed", 1),
    ],
)
def test_the_status_says_whether_there_is_a_run(
    capsys: pytest.CaptureFixture[str], failure: Failure, status: str, code: int
) -> None:
    assert show_error(JobFailed(failure), as_json=True) == code
    told = document(capsys.readouterr().out)
    assert (told["status"], told["exit_code"]) == (status, code)
    assert "run" not in told


@pytest.mark.parametrize(("error", "code", "status"), [(RunError("no"), 2, "refused"), (JobError("no"), 1, "failed")])
def test_the_exit_code_is_the_errors(
    capsys: pytest.CaptureFixture[str], error: QuorateError, code: int, status: str
) -> None:
    assert show_error(error, as_json=False) == code
    assert capsys.readouterr().out == ""
    assert show_error(error, as_json=True) == code
    assert document(capsys.readouterr().out) == {"status": status, "exit_code": code, "error": "no"}


def test_every_mistake_of_a_job_file_is_told_by_itself_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = JobFileError("job.yaml", [Problem("lanes", "is 0", "Use 1.", ("workers",)), Problem("seed", "is text")])
    assert show_error(error, as_json=True) == 2
    assert document(capsys.readouterr().out)["problems"] == [
        {"path": "lanes", "text": "is 0", "hint": "Use 1.", "keys": ["workers"]},
        {"path": "seed", "text": "is text", "hint": "", "keys": []},
    ]


def test_nothing_is_printed_where_nothing_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_error(OutputError("standard output is full"), as_json=True) == 1
    assert capsys.readouterr() == ("", "error: standard output is full\n")


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_gets_lines_that_fit_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    message = "worker 0 has sent no heartbeat for 5.1 s (failure_timeout: 5.0); last seen at step 3, compute."
    show_error(RunError(message), as_json=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err).rstrip("\n").split("\n")
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert " ".join(line.strip() for line in lines) == f"error: {message}"


def test_a_bug_of_ours_shows_its_traceback_and_is_still_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_error(ZeroDivisionError("by zero"), as_json=True) == 1
    told = capsys.readouterr()
    assert "ZeroDivisionError: by zero" in told.err
    assert document(told.out)["error"] == "Quorate itself has failed: ZeroDivisionError: by zero"
