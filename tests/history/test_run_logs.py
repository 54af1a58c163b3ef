import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.history.logs import Filter, RunLogs
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "tiny-0001")
    run.logs.mkdir(parents=True)
    return run


def record(time: float, message: str, **fields: Any) -> str:
    return json.dumps({"time": time, "level": "info", "message": message, **fields})


def messages(logs: RunLogs) -> list[str]:
    return [found.message for found in logs.new()]


def test_logs_of_all_processes_are_merged_by_time(run: RunFolder) -> None:
    LogFile(run.logs / "worker-0.jsonl").append(record(1, "a"), record(4, "d"), record(6, "f"))
    LogFile(run.logs / "worker-1.jsonl").append(record(2, "b"), record(5, "e"))
    LogFile(run.logs / "coordinator.jsonl").append(record(3, "c"))
    assert messages(RunLogs(run)) == list("abcdef")


@given(st.lists(st.lists(st.floats(0, 1e9), max_size=20), max_size=4))
def test_each_log_keeps_its_order_and_nothing_is_lost(times: list[list[float]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "tiny-0001")
        run.logs.mkdir(parents=True)
        for log, moments in enumerate(times):
            lines = [record(moment, f"{log} {number}") for number, moment in enumerate(moments)]
            LogFile(run.logs / f"worker-{log}.jsonl", limit=200, kept=1000).append(*lines)
        found = messages(RunLogs(run))
    for log, moments in enumerate(times):
        own = [text for text in found if text.startswith(f"{log} ")]
        assert own == [f"{log} {number}" for number in range(len(moments))]
    assert len(found) == sum(map(len, times))


def test_what_follows_is_read_across_rotation(run: RunFolder) -> None:
    log, logs = LogFile(run.logs / "worker-0.jsonl", limit=300, kept=4), RunLogs(run)
    found: list[str] = []
    for number in range(200):
        log.append(record(number, str(number)))
        if number % 7 == 0:
            found += messages(logs)
    assert found + messages(logs) == [str(number) for number in range(200)]


def test_one_that_was_rotated_out_meanwhile_is_missed_and_the_rest_is_read(run: RunFolder) -> None:
    log, logs = LogFile(run.logs / "worker-0.jsonl", limit=100, kept=2), RunLogs(run)
    log.append(record(0, "first"))
    assert messages(logs) == ["first"]
    for number in range(1, 50):
        log.append(record(number, str(number)))
    found = messages(logs)
    assert found == [str(number) for number in range(50 - len(found), 50)]
    assert found


def test_half_a_line_is_read_when_it_is_whole(run: RunFolder) -> None:
    file, logs = run.logs / "worker-0.jsonl", RunLogs(run)
    whole = record(1, "whole")
    file.write_text(f"{record(0, 'first')}\n{whole[:20]}")
    assert messages(logs) == ["first"]
    with file.open("a") as more:
        more.write(f"{whole[20:]}\n")
    assert messages(logs) == ["whole"]


def test_following_ends_with_the_job_and_has_what_came_last(run: RunFolder) -> None:
    log, logs = LogFile(run.logs / "worker-0.jsonl"), RunLogs(run)
    log.append(record(0, "before"))
    written = iter([[record(1, "while")], [record(2, "last words")], []])
    running = iter([True, True, False, False, False])
    followed = logs.follow(lambda: next(running), wait=lambda _: log.append(*next(written)))
    assert [found.message for found in followed] == ["before", "while", "last words"]


def test_lines_that_are_no_records_are_shown_as_they_are(run: RunFolder) -> None:
    (run.logs / "worker-1.log").write_text("printed by the task\n")
    (line,) = RunLogs(run).new()
    assert (line.level, line.message, line.process, line.fields["worker"]) == (
        "info",
        "printed by the task",
        "worker 1",
        1,
    )
    assert line.time == (run.logs / "worker-1.log").stat().st_mtime


def test_junk_of_many_megabytes_does_no_harm(run: RunFolder) -> None:
    junk = b"\x00\xff\x1b[2J" * 2_000_000
    (run.logs / "worker-0.jsonl").write_bytes(record(1, "a").encode() + b"\n" + junk + b"\n[1]\n\n")
    (run.logs / "worker-1.jsonl").write_bytes(b'{"time": "then", "message": 5}\n')
    found = [each.message for each in RunLogs(run).new()]
    assert "a" in found
    assert "5" in found


def test_what_cannot_be_read_is_left_out(run: RunFolder) -> None:
    (run.logs / "worker-0.jsonl").mkdir()
    LogFile(run.logs / "worker-1.jsonl").append(record(1, "a"))
    assert messages(RunLogs(run)) == ["a"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Filter(), ["hello", "mind", "broken"]),
        (Filter(worker=1), ["mind", "broken"]),
        (Filter(level="warning"), ["mind", "broken"]),
        (Filter(text="HELL"), ["hello"]),
        (Filter(text="zerodivision"), ["broken"]),
        (Filter(worker=1, level="error"), ["broken"]),
        (Filter(worker=2), []),
    ],
)
def test_lines_can_be_chosen(run: RunFolder, wanted: Filter, found: list[str]) -> None:
    LogFile(run.logs / "worker-0.jsonl").append(record(1, "hello", worker=0))
    LogFile(run.logs / "worker-1.jsonl").append(
        record(2, "mind", worker=1, level="warning"),
        record(3, "broken", worker=1, level="error", exception="ZeroDivisionError"),
    )
    assert [each.message for each in chosen(run, wanted)] == found


def chosen(run: RunFolder, wanted: Filter) -> Iterator[Any]:
    return (each for each in RunLogs(run).new() if wanted.takes(each))
