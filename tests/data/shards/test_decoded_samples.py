"""Decoded samples on the disk are exactly what would be decoded, take no more room than they may, and end no job."""

import os
import resource
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash

from data.shards.shard_files import in_child, small_blocks, write_indexed
from quorate.core.errors import TaskError
from quorate.data.collate import collate
from quorate.data.fingerprint import fingerprint
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples
from quorate.data.threads import Interrupted
from quorate.shards.dataset import Shards
from quorate.shards.decoded_cache import DecodedCache
from quorate.shards.disk_cache import DiskCache

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")


def to_sample(record: str) -> dict[str, Any]:
    return {"x": torch.tensor([len(record), 1.5]), "text": record[:5], "pair": (1, numpy.float32(2))}


def to_large_sample(record: str) -> torch.Tensor:
    return torch.full((1000,), len(record))


def draws(record: str) -> Any:
    return torch.rand(2) + len(record)


def gives_an_object(record: str) -> Any:
    return Path(record)


def refuses_third(record: str) -> int:
    if record.startswith("3 "):
        raise ValueError("no such word")
    return len(record)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_indexed("text", tmp_path / "data", sizes=(8, 5)).folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[int]]:
    """The rows that were decoded."""
    found: deque[int] = deque()
    plain = Shards._sample

    def counted(shards: Shards, record: Any, block: int, row: int) -> Any:
        found.append(row)
        return plain(shards, record, block, row)

    monkeypatch.setattr(Shards, "_sample", counted)
    yield found


def epoch(texts: Path, decode_with: Any, collate_with: Any = list, number: int = 0, **options: Any) -> list[Any]:
    cache = {"folder": texts.parent / "cache", "gb": options.pop("gb", 0.1)}
    shards = Shards(texts, decode=decode_with, cache=cache, cache_key=options.pop("cache_key", "v1"))
    samples = Samples({Source.TRAINING: shards}, collate_with, 1, **options)
    batches: list[Any] = []
    for first in range(0, 13, 2):
        indices = tuple(range(12 - first, max(-1, 10 - first), -1))
        answer = samples[Request(Source.TRAINING, number, indices)]
        assert isinstance(answer, Batch), answer
        batches += answer.content or []
    shards.close()
    return batches


def keep(cache: DecodedCache, *made: tuple[int, int, Any]) -> None:
    """A batch of samples, each with its block and row."""
    with cache.keeping():
        for each in made:
            cache.stage(*each)
        cache.settle(drew=False)


def files(texts: Path, pattern: str = "samples-*") -> list[Path]:
    return sorted((texts.parent / "cache").rglob(pattern))


def test_decoded_samples_are_decoded_once(texts: Path, calls: deque[int]) -> None:
    first = epoch(texts, to_sample)
    assert len(calls) == 13
    second = epoch(texts, to_sample)
    assert len(calls) == 13
    assert len(first) == len(second) == 13
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert (one["text"], one["pair"]) == (other["text"], other["pair"])
        assert type(other["pair"][1]) is numpy.float32
    assert not files(texts, "*.partial")


def test_a_damaged_sample_is_decoded_again(texts: Path, calls: deque[int]) -> None:
    first = epoch(texts, to_sample)
    assert files(texts)
    for path in files(texts):
        content = bytearray(path.read_bytes())
        content[30] ^= 0xFF
        path.write_bytes(content)
    again = epoch(texts, to_sample)
    assert len(calls) > 13
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(first, again, strict=True))
    for path in files(texts):
        path.write_bytes(path.read_bytes()[:-20])
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(first, epoch(texts, to_sample), strict=True))


def test_samples_that_draw_random_numbers_are_not_cached(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = epoch(texts, draws)
    assert not files(texts)
    assert caplog.text.count("draws random numbers") == 1
    assert all(torch.equal(one, other) for one, other in zip(first, epoch(texts, draws), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, epoch(texts, draws, number=1), strict=True))


def test_what_cannot_be_written_down_is_not_cached(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert epoch(texts, gives_an_object) == epoch(texts, gives_an_object)
    assert "they hold a PosixPath" in caplog.text
    assert not files(texts)


def test_a_batch_that_is_left_in_its_middle_leaves_nothing_to_be_kept(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(texts, decode=draws, cache={"folder": texts.parent / "cache"}, cache_key="v1")
    samples = Samples({Source.TRAINING: shards}, list, 1)
    plain = Shards._record
    read: list[int] = []

    def raises(shards: Shards, block: int, row: int) -> Any:
        if len(read) == 12:
            raise Interrupted(RuntimeError("the generation ended"))
        read.append(row)
        return plain(shards, block, row)

    monkeypatch.setattr(Shards, "_record", raises)
    with pytest.raises(Interrupted):
        samples[Request(Source.TRAINING, 0, tuple(range(13)))]
    assert len(read) == 12, "so many were drawn"
    assert shards.decoded is not None
    shards.decoded.settle(drew=False)  # as a batch does that finds all of its samples in the cache
    shards.close()
    assert not files(texts)


def test_what_is_read_outside_of_a_batch_is_not_gathered(texts: Path) -> None:
    shards = Shards(texts, decode=to_sample, cache={"folder": texts.parent / "cache"}, cache_key="v1")
    assert len([shards[index] for index in range(13)]) == 13
    assert shards.decoded is not None
    shards.decoded.settle(drew=False)
    shards.close()
    assert not files(texts)


def test_a_collate_that_changes_samples_does_not_change_what_is_cached(texts: Path, calls: deque[int]) -> None:
    def spoil(samples: Any) -> Any:
        for sample in samples:
            sample["x"].zero_()
        return samples

    epoch(texts, to_sample, spoil)
    assert all(sample["x"][1] == 1.5 for sample in epoch(texts, to_sample))
    assert len(calls) == 13


def test_batches_of_cached_samples_are_collated_alike(texts: Path) -> None:
    plain = Samples({Source.TRAINING: Shards(texts, decode=to_large_sample)}, collate, 1)
    shards = Shards(texts, decode=to_large_sample, cache={"folder": texts.parent / "cache"}, cache_key="v1")
    cached = Samples({Source.TRAINING: shards}, collate, 1)
    for _ in range(2):
        for index in range(13):
            request = Request(Source.TRAINING, 0, (index,))
            one, other = plain[request], cached[request]
            assert isinstance(one, Batch)
            assert isinstance(other, Batch)
            assert torch.equal(one.content, other.content)
    assert shards.decoded is not None
    assert shards.decoded.has(0)


# --- by which key


def to_length(record: str) -> int:
    return len(record)


def to_length_and_one(record: str) -> int:
    return len(record) + 1


def test_samples_are_used_again_under_the_same_key_only(texts: Path, calls: deque[int]) -> None:
    first = epoch(texts, to_length, cache_key="lengths")
    assert epoch(texts, to_length_and_one, cache_key="lengths-and-one") == [length + 1 for length in first]
    assert len(calls) == 26
    assert epoch(texts, to_length, cache_key="lengths") == first
    assert len(calls) == 26


def test_what_an_earlier_version_has_kept_is_not_used(tmp_path: Path) -> None:
    found = DecodedCache(DiskCache(tmp_path, 1_000_000), "data", "v1", numpy.full(1, 1))
    keep(found, (0, 0, "a"))
    (placed,) = tmp_path.rglob("samples-0*")
    earlier = xxhash.xxh3_128_hexdigest(b"data v1"), xxhash.xxh3_128_hexdigest(b"data ")
    assert placed.parent.name not in earlier, "these were named by the data and a digest of the code"


@pytest.mark.parametrize(("key", "text"), [(None, "needs cache_key= with it"), ("", "not empty"), (3, "the int 3")])
def test_a_cache_of_decoded_samples_without_a_key_is_refused(key: Any, text: str, texts: Path) -> None:
    with pytest.raises(TaskError, match=text):
        Shards(texts, decode=to_sample, cache={"folder": texts.parent / "cache"}, cache_key=key)
    Shards(texts, cache={"folder": texts.parent / "cache"})  # of bytes alone, which have a digest


def test_a_decode_that_has_changed_under_its_key_is_found_out_by_its_first_sample(texts: Path) -> None:
    cache = {"folder": texts.parent / "cache"}
    epoch(texts, to_length)
    same = Samples({Source.TRAINING: Shards(texts, decode=to_length, cache=cache, cache_key="v1")}, list, 1)
    assert fingerprint(same) == fingerprint(same)
    shards = Shards(texts, decode=to_length_and_one, cache=cache, cache_key="v1")
    with pytest.raises(TaskError, match=r"Sample 0 of the training set is another one in the cache.*\('v1'\)"):
        fingerprint(Samples({Source.TRAINING: shards}, list, 1))


# --- bad samples


def test_a_bad_sample_is_bad_again_and_the_others_of_its_block_are_cached(texts: Path, calls: deque[int]) -> None:
    first = epoch(texts, refuses_third, skips=True)
    assert len(first) == 12
    assert not files(texts, "*.partial")
    calls.clear()
    assert epoch(texts, refuses_third, skips=True) == first
    assert list(calls) == [3]
    cache = {"folder": texts.parent / "cache", "gb": 0.1}
    strict = Samples({Source.TRAINING: Shards(texts, decode=refuses_third, cache=cache, cache_key="v1")}, list, 1)
    told = strict[Request(Source.TRAINING, 0, (2, 3))]
    assert isinstance(told, FetchFailure)
    assert told.message == "ValueError: no such word (in decode() of record 3 of shard-000.txt)"


def test_what_is_bad_no_longer_is_cached(texts: Path, calls: deque[int], monkeypatch: pytest.MonkeyPatch) -> None:
    epoch(texts, refuses_third, skips=True)
    assert len(files(texts)) > 1
    # As if its record had been read from a disk that fails: the code is the same.
    monkeypatch.setattr(Shards, "_sample", lambda _, record, *__: len(record))
    first = epoch(texts, refuses_third)
    assert len(first) == 13
    assert epoch(texts, refuses_third) == first, "the rest of the block, which was read before"
    monkeypatch.setattr(Shards, "_sample", None)
    assert epoch(texts, refuses_third) == first, "nothing is decoded any more"


# --- room


def test_a_disk_that_takes_no_more_in_the_middle_of_a_sample_leaves_the_job_right(texts: Path) -> None:
    def work() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return [len(sample) for sample in epoch(texts, to_large_sample)] == [1000] * 13

    assert in_child(work)() == 0
    assert not files(texts, "*.partial")
    assert len(epoch(texts, to_large_sample)) == 13
    assert files(texts), "another process writes again"


def test_a_process_that_is_killed_as_it_places_samples_leaves_nothing_that_counts(
    texts: Path, calls: deque[int]
) -> None:
    def work() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            return bool(epoch(texts, to_sample))

    assert in_child(work)() == -signal.SIGKILL
    assert files(texts, "*.partial"), "it was in the middle"
    assert not files(texts)
    epoch(texts, to_sample)
    assert len(calls) == 13
    assert not files(texts, "*.partial"), "what it left was swept"


def test_two_jobs_and_their_loaders_share_a_folder(texts: Path) -> None:
    expected = [len(sample) for sample in epoch(texts, to_large_sample)]
    for path in files(texts):
        path.unlink()

    def work() -> bool:
        # So small that they sweep what the others have made or are making.
        rounds = [epoch(texts, to_large_sample, gb=0.00015) for _ in range(6)]
        return all([len(sample) for sample in each] == expected for each in rounds)

    children = [in_child(work) for _ in range(3)]
    assert [ended() for ended in children] == [0, 0, 0]
