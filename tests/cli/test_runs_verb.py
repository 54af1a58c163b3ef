import io
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from history.run_builder import COMPLETE, CREATED, Story, build_run, complete_run
from quorate.cli.app import app
from quorate.cli.layout import Page
from quorate.cli.runs_view import print_listing
from quorate.core.errors import RequestError
from quorate.history.run_record import Listing, RunQuery
from schemas import validate

NOW = CREATED + timedelta(hours=2)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(here: Path) -> Path:
    """A complete run, one that was lost half way, and one that is damaged; the last is the newest."""
    folder = here / "runs"
    complete_run(folder)
    build_run(folder, story=Story().begin(total_steps=12_000).train(1, 5), after=60)
    build_run(folder, after=120).result_file.write_text("{")
    return folder


def quorate(*arguments: str) -> None:
    app(["runs", *arguments], standalone_mode=False)


def listed(runs: Path, width: int, query: RunQuery | None = None) -> list[str]:
    """The lines on a terminal of this width, without colours."""
    stream = io.StringIO()
    page = Page(stream, is_terminal=False, width=width)
    print_listing(page, Listing.read(runs, query or RunQuery()), NOW)
    return stream.getvalue().splitlines()


def test_a_table_with_all_that_fits(runs: Path) -> None:
    lines = listed(Path("runs"), 80)
    assert lines[:4] == [
        "name       status    steps     best         age      task",
        "tiny-0003  damaged   0/8       -            1 hour   task.py:Tiny",
        "tiny-0002  lost      5/12,000  -            1 hour   task.py:Tiny",
        "tiny-0001  complete  8/8       loss 0.5000  2 hours  task.py:Tiny",
    ]
    assert " ".join(lines[4:]).startswith("tiny-0003 is damaged: runs/tiny-0003/result.json is not JSON")


@pytest.mark.parametrize(("width", "headings"), [(60, 5), (44, 4), (40, 3), (30, 3), (28, 2), (20, 2)])
def test_columns_are_left_out_from_the_right(runs: Path, width: int, headings: int) -> None:
    lines = listed(runs, width)
    assert lines[0].split() == ["name", "status", "steps", "best", "age", "task"][:headings]
    assert max(map(len, lines[:4])) <= width


def test_a_long_name_is_folded_and_never_cut(here: Path) -> None:
    complete_run(here / "runs", job={"name": "a" * 60})
    lines = listed(here / "runs", 40)
    assert "".join(line.split(" ")[0] for line in lines[1:]) == "a" * 60 + "-0001"
    assert "complete" in lines[1]


def test_a_file_gets_everything_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete_run(runs, job={"name": "a" * 90})
    quorate()
    out, err = capsys.readouterr()
    assert err == ""
    assert "a" * 90 + "-0001  complete" in out
    assert not [line for line in out.splitlines() if line.endswith(" ")]


def test_what_is_left_out_by_a_limit_is_counted(runs: Path) -> None:
    lines = listed(runs, 80, RunQuery(limit=1, name="tiny-000"))
    assert lines[1].startswith("tiny-0003")
    assert lines[2] == "and 2 more"


def test_json_is_by_its_schema(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = {"kind": "WorkerLost", "message": "worker 1 was killed", "worker": 1, "step": 5}
    build_run(runs, result={"status": "failed", "failure": failure}, after=180)
    not_finite = {"final_metrics": {"loss": float("nan")}, "best": {"value": float("inf"), "step": 8}}
    build_run(runs, result=COMPLETE | not_finite, after=240)
    quorate("--json", "--limit", "4")
    out, err = capsys.readouterr()
    document = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    validate("runs", document)
    assert (err, document["total"], document["fitting"]) == ("", 5, 5)
    assert document["folder"] == str(runs)
    assert [run["status"] for run in document["runs"]] == ["complete", "failed", "damaged", "lost"]
    assert document["runs"][0]["final_metrics"] == {"loss": None}
    assert document["runs"][1]["failure"]["worker"] == 1


def test_a_name_that_is_not_utf_8_and_events_that_are_a_folder_hide_no_run(here: Path) -> None:
    folder = here / "runs"
    odd, strange = complete_run(folder), complete_run(folder)
    odd.path.rename(folder / "odd\udcff-0001")
    strange.events_file.unlink()
    strange.events_file.mkdir()
    command = [sys.executable, "-m", "quorate"]
    for encoding in ("utf-8:strict", "ascii:strict"):
        told = subprocess.run([*command, "runs"], capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding})
        assert (told.returncode, told.stderr) == (0, b"")
        assert b"odd\\udcff-0001  complete" in told.stdout
        assert b"tiny-0002 is damaged: cannot read runs/tiny-0002/events.jsonl: Is a directory" in told.stdout
    for name in ("odd", "tiny-0002"):
        shown = subprocess.run([*command, "show", name], capture_output=True)
        assert (shown.returncode, shown.stderr) == (0, b"")


def test_filters_and_order_are_passed_on(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quorate("--status", "lost", "--status", "complete", "--sort", "name", "--reverse", "--task", "Tiny", "--json")
    document = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in document["runs"]] == ["tiny-0002", "tiny-0001"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--status", "runing"], "--status: 'runing' is not one of running, submitted, .* Did you mean running?"),
        (["--status", "COMPLETE"], "Did you mean complete?"),
        (["--sort", "colour"], "--sort: 'colour' is not one of age, name, status, steps or metric.$"),
        (["--runs", "elsewhere"], "cannot list the runs in .*/elsewhere: it is not there. .* --runs"),
        (["--runs", "runs/tiny-0001/job.yaml"], "it is a file, not a folder"),
        (["--runs", "runs/tiny-0001"], "is a run, not a folder of runs: look at it with quorate show runs/tiny-0001"),
    ],
)
def test_mistakes_are_told_with_what_to_write(runs: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        quorate(*arguments)
    assert caught.value.exit_code == 2
    assert len(list(runs.iterdir())) == 3


def test_where_there_are_no_runs_it_says_what_to_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quorate()
    out, err = capsys.readouterr()
    assert out.startswith(f"There are no runs in {here}/runs or a folder runs above it yet. `quorate train JOB.yaml`")
    assert err == ""
    (here / "empty").mkdir()
    quorate("--runs", "empty")
    assert f"There are no runs in {here}/empty yet" in capsys.readouterr().out
    quorate("--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    validate("runs", document)
    assert (document["total"], document["runs"]) == (0, [])


def test_the_folder_of_the_variable_is_listed_and_may_be_made_later(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUORATE_RUNS", "elsewhere")
    quorate()
    assert f"There are no runs in {here}/elsewhere yet" in capsys.readouterr().out
    complete_run(here / "elsewhere")
    quorate()
    assert "tiny-0001  complete" in capsys.readouterr().out


def test_runs_are_found_from_a_folder_below_the_project(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    below = runs.parent / "package" / "models"
    (below / "runs" / "events-of-another-tool").mkdir(parents=True)
    for place in (below, runs / "tiny-0001"):
        monkeypatch.chdir(place)
        app(["show", "tiny-0001"], standalone_mode=False)
        assert str(runs / "tiny-0001") in capsys.readouterr().out
    # The nearest ones count.
    complete_run(below / "runs")
    monkeypatch.chdir(below)
    quorate("--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["folder"], document["total"]) == (str(below / "runs"), 1)


def test_where_none_fits_it_says_what_there_is(runs: Path) -> None:
    text = " ".join(listed(runs, 80, RunQuery(task="Tinny", name="x y")))
    assert text == (
        f"None of the 3 runs in {runs} fits --task Tinny --name 'x y'. There are: status complete, damaged, "
        "lost; task task.py:Tiny; name tiny-0001, tiny-0002, tiny-0003."
    )


def test_the_command_lists_a_run_that_was_trained(finished: Path, tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    done = place.run("runs", "--runs", str(finished / "runs"), "--json")
    assert (done.code, done.stderr) == (0, "")
    validate("runs", done.document)
    (run,) = done.document["runs"]
    assert (run["run"], run["status"], run["steps"], run["total_steps"]) == ("tiny-0001", "complete", 8, 8)
    assert (run["workers"], run["lanes"], run["best"]["metric"]) == (2, 4, "loss")
    assert run["task"].endswith("task.py:Tiny")
    refused = place.run("runs", "--limit", "0", "--json")
    assert (refused.code, refused.document["status"]) == (2, "refused")
