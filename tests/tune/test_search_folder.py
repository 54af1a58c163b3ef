"""The folder of a search: made, found among runs, locked, and written line by line."""

import json
from pathlib import Path

import pytest

from quorate.core.errors import RunError
from quorate.core.runs_folder import is_search
from quorate.storage.run_folder import RunFolder
from quorate.tune.folder import SearchFolder


def made(runs: Path, name: str = "find") -> SearchFolder:
    folder = SearchFolder.create(runs, name, "name: find\n", "name: tiny\n")
    folder.tell("search-began", reason="new")
    return folder


def test_it_is_numbered_among_runs_and_is_none(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "find")
    folder = made(tmp_path)
    assert folder.name == "find-0002"
    assert is_search(folder.path)
    assert not is_search(tmp_path)
    assert [run.name for run in RunFolder.all_in(tmp_path)] == ["find-0001"]
    assert [each.name for each in SearchFolder.all_in(tmp_path)] == ["find-0002"]
    assert SearchFolder.all_in(tmp_path / "nowhere") == ()


def test_a_person_means_it_by_name_prefix_path_or_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = made(tmp_path, "other"), made(tmp_path)
    for reference in ("find-0001", "fi", "last", str(newer.path)):
        assert SearchFolder.find(tmp_path, reference).path == newer.path, reference
    monkeypatch.chdir(older.path)
    assert SearchFolder.find(tmp_path, ".").path == older.path.resolve()
    made(tmp_path)
    with pytest.raises(RunError, match="may be any of"):
        SearchFolder.find(tmp_path, "find")
    with pytest.raises(RunError, match=r"no search 'x'.*there are"):
        SearchFolder.find(tmp_path, "x")
    with pytest.raises(RunError, match="quorate tune"):
        SearchFolder.find(tmp_path / "empty", "last")


def test_of_two_that_are_made_within_a_millisecond_the_later_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, moment in (("second", 1_780_000_000.0001), ("first", 1_780_000_000.0002)):
        monkeypatch.setattr("time.time", lambda moment=moment: moment)
        newest = made(tmp_path, name)
    assert SearchFolder.find(tmp_path, "last").path == newest.path


def test_where_a_run_may_be_meant_as_well(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "fish")
    folder = made(tmp_path)
    assert SearchFolder.meant(tmp_path, run.name) is None
    assert SearchFolder.meant(tmp_path, "fi") is None
    for reference in ("fin", folder.name, str(folder.path), "last"):
        found = SearchFolder.meant(tmp_path, reference)
        assert found is not None, reference
        assert found.path == folder.path
    RunFolder.create(tmp_path, "fish")
    assert SearchFolder.meant(tmp_path, "last") is None
    assert SearchFolder.meant(tmp_path, "nothing") is None


def test_whoever_needs_a_run_is_told_where_those_of_a_search_are(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for reference in ("find-0001", str(folder.path)):
        with pytest.raises(RunError, match=r"is a search, not a run: its trials are runs in .*/find-0001/trials"):
            RunFolder.find(tmp_path, reference)


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    folder = made(tmp_path)
    assert folder.holder() is None
    with folder.lock():
        assert folder.holder() is not None
        with pytest.raises(RunError, match="in use by process"), folder.lock():
            pass


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with folder.log_file.open("a") as log:
        log.write('{"time": 1, "kind": "prop')
    told = folder.tell("reported", 1, step=5, metrics={"loss": float("nan")}, best=False)
    lines = folder.log_file.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1]) == told
    assert told["metrics"] == {"loss": None}


def test_a_job_with_secrets_is_for_its_owner_only(tmp_path: Path) -> None:
    shared = SearchFolder.create(tmp_path, "find", "name: find\n", "name: tiny\n")
    private = SearchFolder.create(tmp_path, "find", "name: find\n", "name: tiny\n", is_private=True)
    assert shared.job_file.stat().st_mode & 0o077
    assert not private.job_file.stat().st_mode & 0o077
    assert shared.path.stat().st_mode & 0o777 == 0o700
    opened = SearchFolder.create(tmp_path, "find", "name: find\n", "name: tiny\n", is_shared=True)
    assert opened.path.stat().st_mode & 0o777 == 0o750
