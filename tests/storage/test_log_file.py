import errno
import json
import os
from pathlib import Path

import pytest

from quorate.storage.log_file import LogFile, parts_of


def lines_of(log: Path) -> list[str]:
    return [line for part in parts_of(log) for line in part.read_text().splitlines()]


def test_a_log_that_is_full_is_followed_by_another_and_the_oldest_goes(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "worker-0.jsonl", limit=100, kept=3)
    for number in range(53):
        log.append(json.dumps({"number": number}))
    log.close()
    assert [part.name for part in parts_of(log.path)] == ["worker-0.jsonl.2", "worker-0.jsonl.1", "worker-0.jsonl"]
    numbers = [json.loads(line)["number"] for line in lines_of(log.path)]
    assert numbers == list(range(numbers[0], 53))
    assert all(part.stat().st_size <= 120 for part in parts_of(log.path))


def test_one_who_comes_later_goes_on_in_the_same_file_and_ends_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.jsonl"
    file.write_text('{"a": 1}\n{"half": ')
    LogFile(file).append('{"b": 2}')
    assert file.read_text() == '{"a": 1}\n{"half": \n{"b": 2}\n'


def test_a_full_disk_is_nobodys_trouble_and_is_told_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path / "worker-0.jsonl", {"process": "worker 0"})
    log.append('{"a": 1}')

    def full(descriptor: int, chunk: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("quorate.storage.log_file.write_fully", full)
        log.append('{"b": 2}', '{"c": 3}')
    assert log.missing == 2
    log.append('{"d": 4}')
    first, note, last = (json.loads(line) for line in lines_of(log.path))
    assert (first, last) == ({"a": 1}, {"d": 4})
    assert note["message"] == "2 lines are missing here: worker-0.jsonl could not be written"
    assert (note["level"], note["process"]) == ("warning", "worker 0")
