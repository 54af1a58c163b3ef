import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.served import TOKEN, serve
from quorate.core.errors import FrameError, LinkError
from quorate.doctor.checkup import Call, call_coordinator, check_coordinator, running
from quorate.doctor.report import Level
from quorate.storage.run_folder import Door, RunFolder

ADDRESS = "127.0.0.1:4711"
SECRET = "nobody-may-read-this"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "some")


def goes_on(door: Door) -> bool:
    assert door == Door(ADDRESS, SECRET)
    return False


def nobody(door: Door) -> bool:
    raise LinkError(f"nothing listens at {door.address} (Connection refused)")


def another(door: Door) -> bool:
    raise FrameError("another job's")


@contextlib.contextmanager
def at_work(run: RunFolder, does: bool) -> Iterator[None]:
    with run.lock() if does else contextlib.nullcontext():
        yield


def test_a_coordinator_that_answers(run: RunFolder) -> None:
    run.write_address(ADDRESS, SECRET)
    found = check_coordinator(run, goes_on)
    assert (found.name, found.level) == ("run some-0001", Level.OK)
    assert found.text == f"its coordinator answers at {ADDRESS}: its job is under way"
    assert "just ended" in check_coordinator(run, lambda *_: True).text


@pytest.mark.parametrize(
    ("call", "held", "level", "words"),
    [
        (nobody, True, Level.PROBLEM, "nothing listens at 127.0.0.1:4711 (Connection refused), although process"),
        (nobody, False, Level.WARNING, "nothing works on this run any longer"),
        (another, True, Level.PROBLEM, "another job's coordinator listens at 127.0.0.1:4711"),
        (another, False, Level.WARNING, "another job's coordinator listens at 127.0.0.1:4711"),
    ],
)
def test_a_coordinator_that_does_not_answer(run: RunFolder, call: Call, held: bool, level: Level, words: str) -> None:
    run.write_address(ADDRESS, SECRET)
    with at_work(run, held):
        found = check_coordinator(run, call)
    assert found.level is level
    assert words in found.text
    assert "quorate resume some-0001" in found.remedy
    assert SECRET not in f"{found}"


def test_a_run_without_a_coordinator(run: RunFolder) -> None:
    assert check_coordinator(run, nobody).text == "is not running (without a result)"
    run.write_result({"status": "complete"})
    assert check_coordinator(run, nobody).text == "is not running (complete)"
    with run.lock():
        found = check_coordinator(run, nobody)
    assert found.level is Level.NOTE
    assert "is starting or ending" in found.text


@pytest.mark.parametrize("content", ["{", "[]", '{"address": "nowhere", "token": "x"}', '{"token": "x"}', "7"])
def test_a_damaged_address_is_told(run: RunFolder, content: str) -> None:
    run.address_file.write_text(content)
    found = check_coordinator(run, goes_on)
    assert found.level is Level.WARNING
    assert "coordinator.json cannot be read: it is damaged" in found.text


def test_only_runs_with_a_coordinator_are_running(tmp_path: Path) -> None:
    runs = [RunFolder.create(tmp_path, "some") for _ in range(3)]
    assert running(tmp_path) == []
    runs[1].write_address(ADDRESS, SECRET)
    assert [run.name for run in running(tmp_path)] == ["some-0002"]
    assert running(tmp_path / "absent") == []


def test_a_real_coordinator_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.doctor.checkup.PATIENCE", 60.0)
    with serve(tmp_path, workers=1) as served:
        assert call_coordinator(Door(served.address, TOKEN)) is False
        with pytest.raises(FrameError):
            call_coordinator(Door(served.address, "a token of somebody else"))
    with pytest.raises(LinkError, match="nothing listens at"):
        call_coordinator(Door(served.address, TOKEN))


def test_somebody_who_listens_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.doctor.checkup.PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(LinkError, match="does not answer"):
        call_coordinator(Door(f"127.0.0.1:{mute.getsockname()[1]}", "any"))
