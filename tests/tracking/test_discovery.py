"""The list of running jobs that Prometheus reads: several launchers at once, launchers that were killed, damage."""

import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quorate.storage.run_folder import RunFolder
from quorate.tracking import prometheus
from quorate.tracking.prometheus import FILE, RUN_LABEL, announce, withdraw

spawn = multiprocessing.get_context("spawn")


def listed(runs: Path) -> dict[str, str]:
    """Addresses by run."""
    entries: list[dict[str, Any]] = json.loads((runs / FILE).read_text())
    return {entry["labels"][RUN_LABEL]: entry["targets"][0] for entry in entries}


def launch(runs: Path, number: int, conclude: Any, announced: Any) -> None:
    """What a launcher does, in a process of its own."""
    run = RunFolder.create(runs, "tiny")
    with run.lock():
        announce(run, "tiny", f"127.0.0.1:{number}")
        announced.release()
        conclude.wait(60)
        withdraw(run)


def test_a_run_is_listed_with_its_job_and_goes(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "tiny")
    with run.lock():
        announce(run, "tiny", "127.0.0.1:9400")
        assert json.loads((tmp_path / FILE).read_text()) == [
            {"targets": ["127.0.0.1:9400"], "labels": {"job": "tiny", RUN_LABEL: "tiny-0001"}}
        ]
        announce(run, "tiny", "127.0.0.1:9401")
        assert listed(tmp_path) == {"tiny-0001": "127.0.0.1:9401"}
        withdraw(run)
    assert listed(tmp_path) == {}


def test_launchers_that_write_at_once_lose_nobody(tmp_path: Path) -> None:
    launchers = 8
    conclude, announced = spawn.Event(), spawn.Semaphore(0)
    processes = [spawn.Process(target=launch, args=(tmp_path, i, conclude, announced)) for i in range(launchers)]
    for process in processes:
        process.start()
    for _ in processes:
        assert announced.acquire(timeout=60)
    assert sorted(listed(tmp_path).values()) == [f"127.0.0.1:{i}" for i in range(launchers)]
    conclude.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert listed(tmp_path) == {}
    assert not [left for left in tmp_path.iterdir() if left.name.endswith(".partial")]


def test_a_killed_launcher_is_dropped_by_whoever_writes_next(tmp_path: Path) -> None:
    conclude, announced = spawn.Event(), spawn.Semaphore(0)
    process = spawn.Process(target=launch, args=(tmp_path, 1, conclude, announced))
    process.start()
    assert announced.acquire(timeout=60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert listed(tmp_path) == {"tiny-0001": "127.0.0.1:1"}
    run = RunFolder.create(tmp_path, "tiny")
    with run.lock():
        announce(run, "tiny", "127.0.0.1:2")
    assert listed(tmp_path) == {"tiny-0002": "127.0.0.1:2"}


def test_a_killed_launcher_stays_listed_for_a_while_after_its_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, other = RunFolder.create(tmp_path, "tiny"), RunFolder.create(tmp_path, "tiny")
    announce(gone, "tiny", "127.0.0.1:1")  # nobody holds its lock
    gone.events_file.touch()
    with other.lock():
        announce(other, "tiny", "127.0.0.1:2")
        assert listed(tmp_path) == {"tiny-0001": "127.0.0.1:1", "tiny-0002": "127.0.0.1:2"}, "it can be seen to be down"
        announce(other, "tiny", "127.0.0.1:1")
        assert listed(tmp_path) == {"tiny-0002": "127.0.0.1:1"}, "another has its address"
        announce(gone, "tiny", "127.0.0.1:3")
        monkeypatch.setattr(prometheus, "_KEPT", 0.0)
        announce(other, "tiny", "127.0.0.1:1")
        assert listed(tmp_path) == {"tiny-0002": "127.0.0.1:1"}, "a while later"


@pytest.mark.parametrize(
    "content", ["", "no JSON", "{}", "[1, 2]", '[{"labels": 3}]', '[{"labels": {}, "targets": []}]']
)
def test_a_damaged_list_is_written_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    run = RunFolder.create(tmp_path, "tiny")
    with run.lock():
        announce(run, "tiny", "127.0.0.1:9400")
    entries = json.loads((tmp_path / FILE).read_text())
    assert entries[-1]["targets"] == ["127.0.0.1:9400"]
    assert all(isinstance(entry, dict) for entry in entries)


def test_entries_of_others_stay_and_a_run_elsewhere_is_not_looked_for(tmp_path: Path) -> None:
    ours = {"targets": ["a:1"], "labels": {"job": "by hand"}}
    strange = {"targets": ["b:1"], "labels": {RUN_LABEL: "../tiny-0001"}}
    (tmp_path / FILE).write_text(json.dumps([ours, strange]))
    run = RunFolder.create(tmp_path, "tiny")
    with run.lock():
        announce(run, "tiny", "127.0.0.1:9400")
    assert [entry["targets"] for entry in json.loads((tmp_path / FILE).read_text())] == [["a:1"], ["127.0.0.1:9400"]]


def test_a_writer_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_PATIENCE", 0.1)
    run = RunFolder.create(tmp_path, "tiny")
    with (tmp_path / prometheus._LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="locked"):
            announce(run, "tiny", "127.0.0.1:9400")
