import json

import pytest

from quorate.cli.trouble import tell, tell_bug
from quorate.core.errors import JobError, RunError
from quorate.core.failure import Failure, JobFailed


def test_a_failed_job_is_told_to_people_and_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("UserCodeError", "worker 1: no", worker=1, traceback="Traceback: a line")
    assert tell(JobFailed(failure, "tiny-0001"), as_json=True) == 1
    told = capsys.readouterr()
    assert told.err == "error: worker 1: no\n\nTraceback: a line\n"
    expected = {"status": "failed", "exit_code": 1, "run": "tiny-0001", "error": "worker 1: no"}
    assert json.loads(told.out) == expected | {"failure": failure.to_dict()}


@pytest.mark.parametrize(("error", "code", "status"), [(RunError("no"), 2, "refused"), (JobError("no"), 1, "failed")])
def test_the_exit_code_is_the_errors(
    capsys: pytest.CaptureFixture[str], error: RunError | JobError, code: int, status: str
) -> None:
    assert tell(error, as_json=False) == code
    assert capsys.readouterr().out == ""
    assert tell(error, as_json=True) == code
    assert json.loads(capsys.readouterr().out) == {"status": status, "exit_code": code, "error": "no"}


def test_a_bug_of_ours_shows_its_traceback_and_is_still_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell_bug(ZeroDivisionError("by zero"), as_json=True) == 1
    told = capsys.readouterr()
    assert "ZeroDivisionError: by zero" in told.err
    assert json.loads(told.out)["error"] == "ZeroDivisionError: by zero"
