"""What is cached on the disk is exactly what would be read or decoded, stays below its size, and is never trusted."""

import functools
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from data.shards.shard_files import small_blocks, write_shards
from quorate.core.errors import RequestError
from quorate.data.collate import collate
from quorate.data.reading import Request, Source
from quorate.data.samples import Fetched, Samples
from quorate.data.shards.blocks import ShardBlocks
from quorate.data.shards.cache import DiskCache
from quorate.data.shards.code_identity import Unidentified, identity
from quorate.data.shards.dataset import Shards
from quorate.data.shards.index import NAME
from quorate.data.shards.indexing import build_index
from quorate.data.shards.sample_codec import NotEncodable, _order, decode, encode

__all__ = ["small_blocks"]

pytestmark = pytest.mark.usefixtures("small_blocks")

MB = 1_000_000


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


# --- the folder


def test_what_is_put_is_got_and_no_part_of_a_file_is_ever_seen(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", MB)
    assert cache.get("a/1") is None
    cache.put("a/1", b"content")
    assert cache.get("a/1") == b"content"
    assert DiskCache(tmp_path / "cache", MB).get("a/1") == b"content"
    cache.put("a/1", b"other")
    assert cache.get("a/1") == b"other"
    assert len(files_of(tmp_path / "cache")) == 1


@pytest.mark.parametrize("position", [0, 500, -1])
def test_a_damaged_file_is_not_there(position: int, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MB)
    cache.put("a", bytes(1000))
    content = bytearray((tmp_path / "a").read_bytes())
    content[position] ^= 1
    (tmp_path / "a").write_bytes(content)
    assert cache.get("a") is None
    assert not (tmp_path / "a").exists()


def test_it_stays_below_its_size_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100_000)
    for number in range(300):
        cache.put(f"d/{number}", bytes(1000))
        past = time.time() - 10_000 + number  # as if they had been written seconds apart
        os.utime(tmp_path / f"d/{number}", (past, past))
        assert cache.get("d/0") is not None, "what is used stays"
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 105_000
    assert cache.get("d/299") is not None
    assert cache.get("d/1") is None
    assert len(files_of(tmp_path)) > 50


def test_left_overs_of_dead_processes_are_swept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MB)
    old, new = cache.temporary("a"), cache.temporary("a")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.put("b", bytes(10))
    assert not old.exists()
    assert new.exists()


def test_a_full_disk_ends_the_caching_and_not_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, MB)
    (tmp_path / "d").write_bytes(b"a file where a folder should be")
    for _ in range(3):
        cache.put("d/1", b"content")
    assert cache.get("d/1") is None
    assert caplog.text.count("is written to no longer") == 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be made"):
        DiskCache(tmp_path / "file/cache", MB)


# --- blocks of a store


def test_blocks_of_a_store_are_read_once_and_damage_is_read_again_from_there(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_shards("parquet", data)
    build_index(f"file://{data}").save(data / NAME)
    shards = Shards(f"file://{data}", cache={"folder": tmp_path / "cache", "gb": 0.1})
    expected = shards.batch([0, 30, 45])
    kept = files_of(tmp_path / "cache")
    assert {path.name for path in kept} >= {"0", "tail-0", "5", "tail-1"}

    class Unused(Exception):
        pass

    def unused(*_: Any) -> Any:
        raise Unused

    again = Shards(f"file://{data}", cache={"folder": tmp_path / "cache", "gb": 0.1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardBlocks, "_read_open", unused)
        assert torch.equal(again.batch([0, 30, 45])["vector"], expected["vector"])
    again.close()
    for path in kept:
        path.write_bytes(b"damaged" * 100)
    assert torch.equal(again.batch([0, 30, 45])["vector"], expected["vector"])
    again.close()
    shards.close()


def test_blocks_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    write_shards("parquet", tmp_path / "data")
    build_index(str(tmp_path / "data")).save(tmp_path / "data" / NAME)
    Shards(tmp_path / "data", cache={"folder": tmp_path / "cache"}).batch([0, 40])
    assert not files_of(tmp_path / "cache")


# --- decoded samples


class Decoding:
    """Counts how often it is called."""

    calls = 0


def to_sample(record: str) -> dict[str, Any]:
    Decoding.calls += 1
    return {"x": torch.tensor([len(record), 1.5]), "text": record[:5], "pair": (1, numpy.float32(2))}


def draws(record: str) -> Any:
    Decoding.calls += 1
    return torch.rand(2) + len(record)


def gives_a_set(record: str) -> Any:
    return {record}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    Decoding.calls = 0
    write_shards("text", tmp_path / "data", sizes=(8, 5))
    build_index(str(tmp_path / "data")).save(tmp_path / "data" / NAME)
    return tmp_path / "data"


def epoch(texts: Path, decode_with: Any, collate_with: Any = list, number: int = 0) -> list[Any]:
    shards = Shards(texts, decode=decode_with, cache={"folder": texts.parent / "cache", "gb": 0.1})
    samples = Samples({Source.TRAINING: shards}, collate_with, 1)
    batches = []
    for first in range(0, 13, 2):
        indices = tuple(range(12 - first, max(-1, 10 - first), -1))
        answer = samples[Request(Source.TRAINING, number, indices)]
        assert isinstance(answer, Fetched), answer
        batches += answer.batch
    shards.close()
    return batches


def test_decoded_samples_are_decoded_once(texts: Path) -> None:
    first = epoch(texts, to_sample)
    assert Decoding.calls == 13
    second = epoch(texts, to_sample)
    assert Decoding.calls == 13
    assert len(first) == len(second) == 13
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert (one["text"], one["pair"]) == (other["text"], other["pair"])
        assert type(other["pair"][1]) is numpy.float32
    assert not list((texts.parent / "cache").rglob("*.partial"))


def test_a_damaged_sample_is_decoded_again(texts: Path) -> None:
    first = epoch(texts, to_sample)
    for path in (texts.parent / "cache").rglob("*.samples"):
        content = bytearray(path.read_bytes())
        content[30] ^= 0xFF
        path.write_bytes(content)
    again = epoch(texts, to_sample)
    assert Decoding.calls > 13
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(first, again, strict=True))
    for path in (texts.parent / "cache").rglob("*.samples"):
        path.write_bytes(path.read_bytes()[:-20])
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(first, epoch(texts, to_sample), strict=True))


def test_samples_that_draw_random_numbers_are_not_cached(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = epoch(texts, draws)
    assert not list((texts.parent / "cache").rglob("*.samples"))
    assert caplog.text.count("draws random numbers") == 1
    assert all(torch.equal(one, other) for one, other in zip(first, epoch(texts, draws), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, epoch(texts, draws, number=1), strict=True))


def test_what_cannot_be_written_down_is_not_cached(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert epoch(texts, gives_a_set) == epoch(texts, gives_a_set)
    assert "they hold a set" in caplog.text
    assert not files_of(texts.parent / "cache")


def test_a_collate_that_changes_samples_does_not_change_what_is_cached(texts: Path) -> None:
    def spoil(samples: Any) -> Any:
        for sample in samples:
            sample["x"].zero_()
        return samples

    epoch(texts, to_sample, spoil)
    assert all(sample["x"][1] == 1.5 for sample in epoch(texts, to_sample))
    assert Decoding.calls == 13


def scaled(record: str, scale: float) -> float:
    return len(record) * scale


class Scaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def method(self, record: str) -> float:
        return len(record) * self.scale

    def __call__(self, record: str) -> float:
        return self.method(record)


def closed_over(scale: Any) -> Any:
    return lambda record: len(record) * scale


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: functools.partial(scaled, scale=scale),
        closed_over,
        lambda scale: Scaler(scale).method,
        Scaler,
    ],
    ids=["partial", "closure", "method", "object"],
)
def test_functions_that_make_something_else_are_told_apart(make: Any) -> None:
    assert identity(make(2.0)) == identity(make(2.0)) != identity(make(3.0))


@pytest.mark.parametrize("make", [lambda: closed_over(object()), lambda: Scaler(object()).method])  # type: ignore[arg-type]
def test_functions_that_depend_on_what_cannot_be_looked_into_are_not_cached(
    make: Any, texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Unidentified):
        identity(make())
    with caplog.at_level(logging.WARNING):
        Shards(texts, decode=make(), cache={"folder": texts.parent / "cache"})
    assert "decoded samples are not cached: decode() depends on" in caplog.text


# --- samples as bytes

SAMPLES: list[Any] = [
    None, True, -(2**80), 1.5, float("inf"), "text ä\n", b"", b"bytes", (), [], {},
    {"a": [1, (2, {"b": None})], "": "x"},
    torch.arange(6).reshape(2, 3), torch.zeros(0, 3), torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([True]),
    torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1), torch.randn(3, 4)[:, ::2],
    torch.zeros(2, dtype=torch.complex64),
    numpy.arange(6, dtype=">i4").reshape(3, 2), numpy.asfortranarray(numpy.eye(3)), numpy.float16(1.5),
    numpy.array(7), numpy.zeros((0, 2)), numpy.array(["ab", "c"]), numpy.datetime64("2026-01-01"),
]  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_samples_come_back_exactly_as_they_were(sample: Any) -> None:
    again = decode(encode({"before": b"x", "it": sample, "behind": torch.ones(2)}))
    assert again["before"] == b"x"
    assert torch.equal(again["behind"], torch.ones(2))
    assert type(again["it"]) is type(sample)
    if isinstance(sample, torch.Tensor):
        assert again["it"].dtype == sample.dtype
        assert torch.equal(again["it"], sample)
        assert again["it"].permute(_order(sample.stride())).is_contiguous(), "laid out as it was, without gaps"
        again["it"].zero_()  # and may be changed
    elif isinstance(sample, numpy.ndarray):
        assert again["it"].dtype == sample.dtype
        assert again["it"].shape == sample.shape
        assert again["it"].flags.f_contiguous == sample.flags.f_contiguous
        assert (again["it"] == sample).all()
    else:
        assert again["it"] == sample


@pytest.mark.parametrize(
    "sample",
    [{1, 2}, {1: 2}, object(), torch.ones(2, requires_grad=True), numpy.array([None]),
     torch.nn.Parameter(torch.ones(1)), torch.eye(2).to_sparse(), numpy.ma.array([1])],
    ids=lambda sample: type(sample).__name__,
)  # fmt: skip
def test_what_would_not_come_back_exactly_is_refused(sample: Any) -> None:
    with pytest.raises(NotEncodable):
        encode([sample])


def test_batches_of_cached_samples_are_collated_alike(texts: Path) -> None:
    def numbers(record: str) -> Any:
        return torch.tensor([float(len(record))]), len(record)

    plain = Samples({Source.TRAINING: Shards(texts, decode=numbers)}, collate, 1)
    cached = Samples(
        {Source.TRAINING: Shards(texts, decode=numbers, cache={"folder": texts.parent / "cache"})}, collate, 1
    )
    for _ in range(2):
        for index in range(13):
            request = Request(Source.TRAINING, 0, (index,))
            one, other = plain[request], cached[request]
            assert isinstance(one, Fetched)
            assert isinstance(other, Fetched)
            assert torch.equal(one.batch[0], other.batch[0])
            assert torch.equal(one.batch[1], other.batch[1])
