import io
import sys
from pathlib import Path

import pytest

from made_events import make_event
from quorate.api import train
from quorate.api.prints import NoDisplay, RunStart, Watch
from quorate.observe.console import Console
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder

SPEC = JobSpec.model_validate(
    {"task": "a.b:C", "batch_size": 8, "steps": 6, "early_stop": {"metric": "loss", "patience": 1}}
)


def begun(folder: Path) -> RunStart:
    return RunStart(RunFolder(folder), SPEC, workers=2)


def test_a_run_below_the_working_folder_is_named_as_it_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "runs" / "c-0001", Path("/elsewhere/c-0001")):
        train.show_on_stderr(begun(folder)).handle(make_event("run", None, {"from_step": 0, "total_steps": 6}))
    assert stream.getvalue().splitlines() == [
        "c-0001 in runs/c-0001: 8 lanes on 2 workers",
        "c-0001 in /elsewhere/c-0001: 8 lanes on 2 workers",
    ]


def test_an_early_stop_is_told_with_the_rule_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    shown = train.show_on_stderr(begun(tmp_path))
    shown.handle(make_event("run", None, {"from_step": 0, "total_steps": 6}))
    shown.handle(make_event("finished", None, {"result": {"ending": "early stop", "steps": 4}}))
    assert (
        stream.getvalue().splitlines()[-1] == "stopped early after 4 steps: the last evaluation brought no better loss"
    )


@pytest.mark.parametrize("watch", [train.show_on_stderr, train.show_quietly])
def test_a_program_without_standard_error_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    assert isinstance(watch(begun(tmp_path)), Console)
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(watch(begun(tmp_path)), NoDisplay)


def test_a_script_may_ask_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = train.watch_here(progress=False)
    watch(begun(tmp_path)).handle(make_event("run", None, {"from_step": 0, "total_steps": 6}))
    assert capsys.readouterr() == ("", "")
