import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import quorate.cli
import schemas
from command import Done
from quorate.api.result import Result
from quorate.cli.jobs import report
from quorate.cli.main import _report_stop
from quorate.cli.output import print_document
from quorate.storage.run_folder import RunFolder

NAN, INFINITE = float("nan"), float("inf")


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return Done(0, capsys.readouterr().out, "").document


def test_what_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_document({"a": NAN, "b": [1.5, -INFINITE], "c": {"d": (INFINITE, None, "NaN", True)}})
    assert printed(capsys) == {"a": None, "b": [1.5, None], "c": {"d": [None, None, "NaN", True]}}


def test_there_is_one_document_on_an_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_document({"first": 1})
    print_document({"second": 2})
    assert printed(capsys) == {"first": 1}
    monkeypatch.setattr(sys, "stdout", another := io.StringIO())
    print_document({"third": 3})
    assert json.loads(another.getvalue()) == {"third": 3}


@pytest.mark.parametrize(
    ("number", "word", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGHUP, "terminated", 143)]
)
def test_a_signal_after_the_document_adds_none(
    capsys: pytest.CaptureFixture[str], number: int, word: str, code: int
) -> None:
    print_document({"status": "complete"})
    assert _report_stop(number, as_json=True) == code
    told = capsys.readouterr()
    assert json.loads(told.out) == {"status": "complete"}
    assert told.err == f"{word}\n"


def test_a_job_that_ends_with_a_metric_that_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {
        "run": "tiny-0001",
        "folder": "/w/runs/tiny-0001",
        "status": "complete",
        "ending": "complete",
        "from_step": 0,
        "steps": 8,
        "weights_digest": "",
        "samples_per_second": 3.5,
        "wall_seconds": 1.0,
        "final_metrics": {"loss": NAN, "accuracy": 0.5},
        "best": {"value": INFINITE, "step": 8},
        "recoveries": [],
    }
    with pytest.raises(typer.Exit):
        report(Result.of(RunFolder(Path("/w/runs/tiny-0001")), fields), as_json=True)
    document = printed(capsys)
    schemas.validate("train", document)
    assert document == fields | {"final_metrics": {"loss": None, "accuracy": 0.5}, "best": {"value": None, "step": 8}}


def test_the_test_tools_refuse_what_is_not_json() -> None:
    with pytest.raises(AssertionError, match="NaN is not JSON"):
        _ = Done(0, '{"metrics": {"loss": NaN}}', "").document
    with pytest.raises(ValueError, match="not JSON compliant"):
        schemas.validate("eval", {"metrics": {"loss": NAN}})


def test_every_verb_prints_its_document_in_this_way() -> None:
    sources = Path(quorate.cli.__path__[0]).glob("*.py")
    assert [source.name for source in sources if "dumps(" in source.read_text()] == ["output.py"]
