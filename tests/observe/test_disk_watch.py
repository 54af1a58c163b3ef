"""A disk that fills up while a job runs is told by whoever looks on: the job cannot write it down."""

import errno
import os
from pathlib import Path

import pytest

from made_events import make_event
from quorate.observe.jsonl import SILENCE, DiskWatch, EventTail, JsonlSink, try_to_write


class Disk:
    """A disk and a clock that do as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tried = 0
        self.error: OSError | None = None

    def attempt(self, _: Path) -> None:
        self.tried += 1
        if self.error is not None:
            raise self.error

    def watch(self, folder: Path) -> DiskWatch:
        return DiskWatch(folder, lambda: self.now, self.attempt)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def full(disk: Disk) -> Disk:
    disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return disk


def test_a_job_that_tells_something_is_not_asked(full: Disk, tmp_path: Path) -> None:
    watch = full.watch(tmp_path)
    for _ in range(5):
        full.now += SILENCE
        assert watch.look(has_news=True) is None
    assert full.tried == 0


def test_a_full_disk_is_told_once_in_a_sentence_with_the_remedy(full: Disk, tmp_path: Path) -> None:
    watch = full.watch(tmp_path)
    full.now += SILENCE - 0.1
    assert watch.look(has_news=False) is None
    full.now += 0.1
    told = watch.look(has_news=False)
    assert told is not None and told.message is not None
    assert told.message.startswith(f"cannot write in {tmp_path}: No space left on device. Training continues")
    assert "Make room there: a checkpoint that fails is tried again" in told.message
    full.now += 10 * SILENCE
    assert watch.look(has_news=False) is None


def test_it_is_told_again_when_it_comes_again(full: Disk, tmp_path: Path) -> None:
    watch = full.watch(tmp_path)
    for _ in range(2):
        full.now += SILENCE
        assert watch.look(has_news=False) is not None
        assert watch.look(has_news=True) is None


def test_a_job_that_is_only_slow_is_not_told_of(disk: Disk, tmp_path: Path) -> None:
    watch = disk.watch(tmp_path)
    for _ in range(3):
        disk.now += SILENCE
        assert watch.look(has_news=False) is None
        assert watch.look(has_news=False) is None
    assert disk.tried == 3
    disk.error = FileNotFoundError(errno.ENOENT, "no such folder yet")
    disk.now += SILENCE
    assert watch.look(has_news=False) is None


def test_whoever_follows_the_events_hears_of_it_among_them(full: Disk, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path, full.watch(tmp_path))
    sink = JsonlSink(path)
    sink.handle(make_event("step", 1))
    assert [event.kind for event in tail.read_new()] == ["step"]
    full.now += SILENCE
    assert [event.kind for event in tail.read_new()] == ["log"]
    assert tail.read_new() == []
    sink.handle(make_event("step", 2))
    sink.close()
    assert [event.step for event in tail.read_new()] == [2]


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    try_to_write(tmp_path)
    assert list(tmp_path.iterdir()) == []
