"""Streams: who reads which sample of which iterator, what is read again, and what is refused."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import gang
import quorate
from bits import bit_tasks as tasks
from quorate.data.bad_sample import Unreachable
from quorate.data.datasets import check_dataset
from quorate.data.stream import Stream, StreamSampler
from quorate.spec.job import JobSpec
from quorate.worker.assembly import build_samples, sampler_of

Place = tuple[int, int, int]


def job(**keys: Any) -> JobSpec:
    return gang.job(tasks.Streamed, **{"lanes": 4, "batch_size": 10, "epochs": 2} | keys)


def counted(opened: list[Place] | None = None, length: int | None = None) -> Any:
    """Gives (epoch, shard, position), and notes what is opened."""

    def read(epoch: int, shard: int, shards: int) -> Iterator[Place]:
        if opened is not None:
            opened.append((epoch, shard, shards))
        for position in itertools.count() if length is None else range(length):
            yield epoch, shard, position

    return read


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize(("lanes", "batch_size", "samples"), [(4, 10, 43), (3, 4, 24), (5, 7, 36), (1, 3, 10)])
def test_each_lane_reads_its_own_stream_in_order(lanes: int, batch_size: int, samples: int, last_batch: str) -> None:
    spec = job(lanes=lanes, batch_size=batch_size, last_batch=last_batch)
    opened: list[Place] = []
    stream = Stream(counted(opened), samples)
    stream.bind(spec)
    sampler = StreamSampler(spec, len(stream))
    for epoch in range(2):
        first, last = epoch * sampler.steps_per_epoch + 1, (epoch + 1) * sampler.steps_per_epoch
        for lane in range(lanes):
            numbers = [n for step in range(first, last + 1) for n in sampler.share(step, lane).tolist()]
            assert [stream.read(epoch, n) for n in numbers] == [(epoch, lane, at) for at in range(len(numbers))]
        used = [n for step in range(first, last + 1) for n in sampler.batch(step).tolist()]
        assert sorted([*used, *sampler.dropped(epoch).tolist()]) == list(range(samples))
    assert sorted(opened) == sorted({(epoch, lane, lanes) for epoch, lane, _ in opened}), "each is opened once"


def test_what_was_read_last_is_there_again_and_the_rest_is_read_anew() -> None:
    opened: list[Place] = []
    stream = Stream(counted(opened), 400)
    stream.bind(job(lanes=1))
    assert stream.read(0, 50) == (0, 0, 50)
    assert [stream.read(0, n) for n in range(41, 51)] == [(0, 0, n) for n in range(41, 51)]
    assert len(opened) == 1
    assert stream.read(0, 3) == (0, 0, 3)
    assert len(opened) == 2


def test_bookmarks_save_reading_from_the_beginning(tmp_path: Path) -> None:
    def stream() -> tuple[Stream, list[tasks.Counting]]:
        made: list[tasks.Counting] = []

        def read(epoch: int, shard: int, shards: int) -> tasks.Counting:
            made.append(tasks.Counting(epoch + shard / shards))
            return made[-1]

        given = Stream(read, samples=1000)
        given.bookmarks = tmp_path
        given.bind(job(lanes=1))
        return given, made

    given, _ = stream()
    expected = [given.read(1, n)[0] for n in range(500)]
    again, made = stream()
    # Whoever reads 480 from the beginning would be at position 481 of its own counting as well: so count the calls.
    calls = 0
    read_next = tasks.Counting.__next__

    def count(self: tasks.Counting) -> Any:
        nonlocal calls
        calls += 1
        return read_next(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.Counting, "__next__", count)
        assert torch.equal(again.read(1, 480)[0], expected[480])
    assert made[0].position == 481
    assert calls <= 1000 // 64 + 1
    newest = max(tmp_path.glob("shard-0/1/*.pt"), key=lambda file: int(file.stem))
    newest.write_bytes(newest.read_bytes()[:20])  # cut off: the one before it does
    assert torch.equal(stream()[0].read(1, 499)[0], expected[499])


def test_a_stream_that_ends_early_says_which_and_what_to_do() -> None:
    stream = Stream(counted(length=10), 43)
    stream.bind(job())
    assert stream.read(0, 2) == (0, 0, 2)
    with pytest.raises(Unreachable, match=r"shard 0 of 4 ended after 10 samples in epoch 0.*samples=43 needs 13"):
        for number in (10, 20, 30, 40):
            stream.read(0, number)


def test_refusals() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    with pytest.raises(quorate.TaskError, match=r"quorate\.Stream\(open, samples=N\)"):
        check_dataset(Plain(), "training")
    with pytest.raises(quorate.TaskError, match="training set of a task's datasets"):
        check_dataset(Stream(counted()), "validation")
    with pytest.raises(quorate.TaskError, match="takes a function"):
        Stream([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(quorate.TaskError, match="at least 1"):
        Stream(counted(), samples=0)
    with pytest.raises(quorate.TaskError, match="has no epochs"):
        Stream(counted()).bind(job())
    Stream(counted()).bind(job(epochs=None, steps=5))

    class Ordered(tasks.Streamed):
        def order(self, epoch: int, generator: Any) -> Any:
            return range(3)

    with pytest.raises(quorate.TaskError, match="order"):
        sampler_of(job(), Ordered(), Stream(counted(), 40))


def test_without_an_end_a_longer_job_goes_on(tmp_path: Path) -> None:
    class Endless(tasks.Streamed):
        def datasets(self) -> Any:
            return Stream(self.read), tasks.Points(21)

    keys: dict[str, Any] = {"epochs": None, "batch_size": 18}
    (tmp_path / "parts").mkdir()
    (tmp_path / "once").mkdir()
    gang.train(Endless, job(steps=4, **keys), 2, tmp_path / "parts")
    extended = gang.train(Endless, job(steps=9, **keys), 3, tmp_path / "parts")
    assert extended.digest == gang.train(Endless, job(steps=9, **keys), 1, tmp_path / "once").digest
    assert len(build_samples(Endless(), job(steps=4, **keys)).datasets) == 2
