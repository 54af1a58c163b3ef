import contextlib
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from history.run_builder import COMPLETE, CREATED, add_checkpoint, build_run, complete_run
from quorate.api import clean
from quorate.cli.app import app
from quorate.core.errors import RequestError
from quorate.history.run_record import RunRecord, Status
from quorate.storage.run_folder import RunFolder
from schemas import validate

DAY = 86400


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs that ended 40, 30, 20 and 10 days ago; the second is the best."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    began = (datetime.now(UTC) - CREATED).total_seconds()
    for days, loss in ((40, 0.5), (30, 0.25), (20, 0.5), (10, 0.5)):
        result = COMPLETE | {"best": {"metric": "loss", "mode": "min", "value": loss, "step": 4}}
        run = build_run(folder, result=result, after=began - days * DAY)
        for step in (4, 6, 8):
            add_checkpoint(run, step)
    return folder


def quorate(*arguments: str) -> None:
    app(["clean", *arguments], standalone_mode=False)


def document(*arguments: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        quorate(*arguments, "--json")
    found: dict[str, Any] = json.loads(printed.getvalue())
    validate("clean", found)
    return found


def names(runs: Path) -> list[str]:
    return [run.name for run in RunFolder.all_in(runs)]


@pytest.mark.parametrize(
    ("asked", "goes"),
    [
        (("--older-than", "35d"), ["tiny-0001"]),
        (("--older-than", "15d"), ["tiny-0001", "tiny-0003"]),
        (("--keep", "1"), ["tiny-0001", "tiny-0003"]),
        (("--keep", "2", "--older-than", "2w"), ["tiny-0001"]),
        (("--older-than", "1y"), []),
        (("--keep", "0", "--name", "other"), []),
    ],
)
def test_by_age_and_count_and_never_the_best(asked: tuple[str, ...], goes: list[str], runs: Path) -> None:
    told = document(*asked)
    assert not told["removed"]
    assert sorted(each["run"] for each in told["runs"]) == goes
    assert len(names(runs)) == 4, "nothing goes before somebody has said yes"
    done = document(*asked, "--yes")
    for each in (*told["runs"], *done["runs"]):
        del each["age_seconds"]  # a second may have passed
    assert done == told | {"removed": True}
    assert [name for name in ("tiny-0001", "tiny-0002", "tiny-0003", "tiny-0004") if name not in names(runs)] == goes
    assert not list(runs.glob(".*")), "nothing is left of them"
    assert done["bytes"] == sum(each["bytes"] for each in done["runs"])
    if "tiny-0001" in goes:
        assert done["bytes"] > 900


def test_what_goes_and_what_stays_is_shown_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(runs / "tiny-0003").lock():
        quorate("--older-than", "15d")
    shown = capsys.readouterr().out
    assert "tiny-0001  complete  39 days" in shown or "tiny-0001  complete  40 days" in shown
    assert "tiny-0002 stays: it is the best of tiny (loss 0.2500)" in shown
    assert "tiny-0003 stays: it is running" in shown
    assert "1 run, " in shown
    assert "Nothing was removed: add --yes" in shown
    quorate("--older-than", "15d", "--dry-run")
    assert capsys.readouterr().out.endswith(" to be freed.\n")
    with pytest.raises(RequestError, match="--yes removes, and --dry-run does not"):
        quorate("--older-than", "15d", "--dry-run", "--yes")
    assert len(names(runs)) == 4


def test_an_answer_on_a_terminal(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda *_, **__: next(answers))
    quorate("--older-than", "35d")
    assert len(names(runs)) == 4
    quorate("--older-than", "35d")
    assert len(names(runs)) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("Removed: ")


def test_only_checkpoints_and_never_the_best_or_the_last(runs: Path) -> None:
    (runs / "tiny-0003/checkpoints/step-00000008-evaluated/state.safetensors").write_bytes(b"damaged")
    told = document("--older-than", "15d", "--checkpoints", "--yes")
    thinned = {each["run"]: each["checkpoints"] for each in told["runs"]}
    assert thinned == {name: ["step-00000006-evaluated"] for name in ("tiny-0001", "tiny-0002")}
    assert told["bytes"] >= 600
    assert len(names(runs)) == 4
    left = {run.name: sorted(path.name[11:13] for path in run.checkpoints.iterdir()) for run in RunFolder.all_in(runs)}
    assert left["tiny-0001"] == left["tiny-0002"] == ["04", "08"]
    assert left["tiny-0003"] == ["04", "06", "08"], "6 is the newest that is whole"
    assert document("--older-than", "15d", "--checkpoints")["runs"] == []


def test_what_the_registry_names_stays(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "why_registered", lambda run, _: "a reason" if run.name == "tiny-0001" else "")
    told = document("--keep", "0", "--yes")
    assert {"run": "tiny-0001", "why": "a reason"} in told["kept"]
    assert names(runs) == ["tiny-0001", "tiny-0002"]


def test_a_run_that_is_begun_meanwhile_stays(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clean.remove

    def begun(found: Any) -> None:
        with RunFolder(runs / "tiny-0001").lock():
            real(found)

    monkeypatch.setattr(clean, "remove", begun)
    told = document("--older-than", "35d", "--yes")
    assert (told["runs"], told["bytes"]) == ([], 0)
    assert "in use" in told["kept"][-1]["why"]
    assert len(names(runs)) == 4


def test_searches_and_their_trials_stay(runs: Path) -> None:
    from tune.search_builder import told_search  # of an option, which the tests of the core do without

    search = told_search(runs).folder
    complete_run(search.trials)
    document("--keep", "0", "--yes")
    assert search.search_file.is_file()
    with pytest.raises(RequestError, match="trials of the search"):
        quorate("--runs", str(search.trials), "--keep", "0")


@pytest.mark.parametrize("asked", [(), ("--older-than", "30"), ("--older-than", "soon"), ("--older-than", "-1d")])
def test_a_request_that_says_too_little_is_refused(asked: tuple[str, ...], runs: Path) -> None:
    with pytest.raises(RequestError, match="--older-than"):
        quorate(*asked)


def test_a_linked_run_goes_where_it_lies(runs: Path, tmp_path: Path) -> None:
    there = tmp_path / "storage" / "tiny-0001"
    there.parent.mkdir()
    (runs / "tiny-0001").rename(there)
    (runs / "tiny-0001").symlink_to(there)
    assert document("--older-than", "35d", "--yes")["bytes"] > 900
    assert not there.exists()
    assert not (runs / "tiny-0001").is_symlink()
    (runs / "tiny-0003" / "checkpoints").rename(tmp_path / "storage" / "checkpoints")
    (runs / "tiny-0003" / "checkpoints").symlink_to(tmp_path / "storage" / "checkpoints")
    kept = document("--older-than", "15d", "--yes")["kept"]
    assert [each["run"] for each in kept if "storage" in each["why"]] == ["tiny-0003"]


def test_ages_are_since_the_end() -> None:
    record = RunRecord("x", Path(), Status.COMPLETE, "", CREATED, ended=CREATED + timedelta(days=2))
    assert clean.age_of(record, CREATED + timedelta(days=3)) == DAY
