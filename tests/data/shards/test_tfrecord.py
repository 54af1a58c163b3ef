"""TFRecord files: what is particular to them. What every kind of shard must do is in test_formats."""

import builtins
import gzip
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import numpy
import pytest
import torch

import gang
from bits.bit_tasks import Regression
from data.shards.shard_files import assert_same, index_folder, write_shards, write_tfrecord
from data.shards.test_formats import all_records
from quorate.core.errors import RequestError
from quorate.shards.dataset import Shards
from quorate.shards.formats.format import BadRecord
from quorate.shards.formats.kinds import is_compressed_shard, kind_of
from quorate.shards.formats.tfrecord import parse_example
from quorate.shards.indexing import build_index

pytestmark = pytest.mark.usefixtures("small_blocks")


def framed(payload: bytes) -> bytes:
    """A record, by the specification."""
    length = struct.pack("<Q", len(payload))
    return b"".join([length, masked(length), payload, masked(payload)])


def masked(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)


def field(number: int, content: bytes) -> bytes:
    size = len(content)
    length = [size] if size < 128 else [size & 0x7F | 0x80, size >> 7]
    return bytes([number << 3 | 2, *length]) + content


def example(*features: tuple[str, bytes]) -> bytes:
    return field(1, b"".join(field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features))


def test_lists_are_read_packed_and_one_by_one_and_empty() -> None:
    found = parse_example(
        memoryview(
            example(
                ("packed", field(3, field(1, b"\x01\xac\x02" + b"\xff" * 9 + b"\x01"))),
                ("singly", field(3, b"\x08\x05\x08\xac\x02")),
                ("floats", field(2, b"\x0d" + struct.pack("<f", 1.5) + b"\x0d" + struct.pack("<f", -2.0))),
                ("none", field(3, b"")),
                ("no bytes", field(1, b"")),
                ("several", field(1, field(1, b"a") + field(1, b"") + field(1, b"c"))),
                ("unset", b""),
            )
        )
    )
    assert_same(found["packed"], numpy.array([1, 300, -1], numpy.int64))
    assert_same(found["singly"], numpy.array([5, 300], numpy.int64))
    assert_same(found["floats"], numpy.array([1.5, -2.0], numpy.float32))
    assert_same(found["none"], numpy.array([], numpy.int64))
    assert found["no bytes"] == [] and found["several"] == [b"a", b"", b"c"] and found["unset"] is None
    assert parse_example(memoryview(b"")) == {}


def test_files_of_beam_are_shards_by_their_ending_before_the_number(tmp_path: Path) -> None:
    assert kind_of("mnist-train.tfrecord-00000-of-00010") == kind_of("a.tfrecords") == "tfrecord"
    assert is_compressed_shard("a.tfrecord.gz")
    written = write_shards("tfrecord", tmp_path, (3, 4))
    for number, file in enumerate(written.files):
        file.rename(tmp_path / f"train.tfrecord-{number:05d}-of-00002")
    index = build_index(str(tmp_path))
    assert len(index) == 7 and index.schema == {"id": "int64", "raw": "bytes", "x": "float"}
    for found, expected in zip(all_records(index), written.records, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["GZIP", "ZLIB"])
def test_compressed_files_are_refused_in_words(pack: Any, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(pack(framed(example())))
    with pytest.raises(RequestError, match=r"a\.tfrecord is compressed as a whole .*Write it without compression"):
        build_index(str(tmp_path))


def test_a_length_that_looks_like_a_compressed_file_is_a_length(tmp_path: Path) -> None:
    payload = bytes(0x088B1F)
    record = framed(payload)
    assert record.startswith(b"\x1f\x8b\x08")
    (tmp_path / "a.tfrecord").write_bytes(record)
    assert len(build_index(str(tmp_path))) == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content, at: content[: at + 5], "in the middle of a length: it was cut off"),
        (lambda content, at: content[:-3], "bytes of the record: it was cut off"),
        (lambda content, at: flipped(content, at + 1), "the checksum of its length .* does not hold"),
        (lambda content, at: flipped(content, at + 20), "its checksum is 0x.*, and 0x.* was written"),
        (lambda content, at: flipped(content, len(content) - 1), "its checksum is 0x.*, and 0x.* was written"),
    ],
    ids=["cut in a length", "cut in a record", "length", "content", "checksum"],
)
def test_damage_is_told_with_file_record_and_byte(damage: Any, told: str, tmp_path: Path) -> None:
    [file] = write_shards("tfrecord", tmp_path, (4,)).files
    content = file.read_bytes()
    at = 0
    for _ in range(3):
        at += 16 + struct.unpack_from("<Q", content, at)[0]
    file.write_bytes(damage(content, at))
    with pytest.raises(RequestError, match=rf"shard-000\.tfrecord, record 3, byte {at}: .*{told}.*Repair or remove"):
        build_index(str(tmp_path))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"hello, world", "."),
        (field(1, b"") + field(2, b""), "SequenceExample"),
        (example(("a", field(3, field(1, b"\x80")))), "."),
        (example(("a", field(3, field(1, b"\xff" * 11 + b"\x01")))), "."),
        (example(("a", field(2, field(1, b"\0\0\0")))), "."),
        (b"\x0a\x50", "."),
    ],
)
def test_a_record_that_is_no_example_is_a_bad_record_with_its_number(payload: bytes, why: str, tmp_path: Path) -> None:
    good = framed(example(("a", field(3, field(1, b"\x07")))))
    (tmp_path / "a.tfrecord").write_bytes(good + framed(payload))
    index = build_index(str(tmp_path))
    with pytest.raises(
        BadRecord, match=rf"a\.tfrecord, record 1, byte {len(good)}: it is no tf\.train\.Example: .*{why}"
    ):
        all_records(index)


class FromTfRecords(Regression):
    folder: str

    def datasets(self) -> Any:
        def decode(record: dict[str, Any]) -> Any:
            return torch.from_numpy(record["x"]), torch.tensor(float(record["id"][0]))

        return Shards(self.folder, decode=decode)

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)


def test_training_on_them_comes_to_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    random = numpy.random.default_rng(3)
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in range(3):
        rows = [{"id": [row % 7], "x": random.random(4, numpy.float32), "raw": random.bytes(90)} for row in range(20)]
        write_tfrecord(folder / f"{shard}.tfrecord", rows)
    index_folder(folder)
    digests = set()
    for workers in (1, 2, 3):
        place = tmp_path / str(workers)
        place.mkdir()
        spec = gang.job(FromTfRecords, epochs=2, params={"folder": str(folder)})
        digests.add(gang.train(FromTfRecords, spec, workers, place).digest)
    assert len(digests) == 1


def test_without_the_library_to_index_takes_words_and_to_read_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tfrecord(tmp_path / "a.tfrecord", [{"id": [1], "x": [0.5], "raw": b"r"}])
    index = build_index(str(tmp_path))
    monkeypatch.delitem(sys.modules, "google_crc32c")
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "google_crc32c":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert all_records(index)[0]["raw"] == b"r"
    with pytest.raises(RequestError, match=r"google-crc32c: pip install .*\[tfrecord\]"):
        build_index(str(tmp_path))
