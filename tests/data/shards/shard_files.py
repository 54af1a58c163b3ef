"""Small datasets of each kind of shard, and what their records should be."""

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tfrecord.writer import TFRecordWriter

from quorate.shards.formats import format as ranges
from quorate.shards.formats import hdf5, lines, tar, tfrecord
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index

KINDS = {"tar": "tar", "jsonl": "jsonl", "text": "txt", "parquet": "parquet", "hdf5": "h5", "tfrecord": "tfrecord"}
SMALL_BLOCK = 2000


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few records, so that small files have several."""
    for module in (hdf5, lines, ranges, tar, tfrecord):
        monkeypatch.setattr(module, "BLOCK", SMALL_BLOCK)


@dataclass(frozen=True)
class Written:
    """Shards in a folder, and all their records in order."""

    kind: str
    folder: Path
    records: tuple[Any, ...]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*.{KINDS[self.kind]}"))


def write_shards(kind: str, folder: Path, sizes: Sequence[int] = (30, 1, 17), seed: int = 0) -> Written:
    """So many shards, each with so many records."""
    folder.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(seed)
    records: list[Any] = []
    for number, count in enumerate(sizes):
        rows = [MAKERS[kind][0](random, len(records) + row) for row in range(count)]
        MAKERS[kind][1](folder / f"shard-{number:03d}.{KINDS[kind]}", rows)
        records += rows
    return Written(kind, folder, tuple(records))


def write_tar(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as opened:
        for row in rows:
            for field, content in row.items():
                if field != "__key__":
                    add_member(opened, f"{row['__key__']}.{field}", content)


def add_member(opened: tarfile.TarFile, name: str, content: bytes = b"") -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    opened.addfile(member, io.BytesIO(content))


def write_parquet(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = pa.table(
        {
            "id": pa.array([row["id"] for row in rows], pa.int64()),
            "weight": pa.array([row["weight"] for row in rows], pa.float32()),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(numpy.concatenate([row["vector"] for row in rows])), len(rows[0]["vector"])
            ),
            "name": pa.array([row["name"] for row in rows], pa.string()),
        }
    )
    parquet.write_table(table, file, row_group_size=7)


def write_hdf5(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with h5py.File(file, "w") as opened:
        opened["label"] = numpy.array([row["label"] for row in rows], dtype=numpy.int32)
        picture = numpy.stack([row["group/picture"] for row in rows])
        opened.create_dataset(
            "group/picture", data=picture, chunks=(min(4, len(rows)), *picture.shape[1:]), compression="gzip"
        )


def write_tfrecord(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    kinds = {"id": "int", "x": "float", "raw": "byte"}
    writer = TFRecordWriter(str(file))
    for row in rows:
        writer.write({name: (value, kinds[name]) for name, value in row.items()})
    writer.close()


def _tfrecord_row(random: numpy.random.Generator, number: int) -> dict[str, Any]:
    numbers = numpy.array([number, -number, 1 << (number % 63)][: 1 + number % 3], numpy.int64)
    return {"id": numbers, "x": random.random(number % 20 + 1, numpy.float32), "raw": random.bytes(number * 7 % 300)}


def _tar_row(random: numpy.random.Generator, number: int) -> dict[str, Any]:
    size = int(random.integers(0, 900))
    return {"__key__": f"sample/{number:06d}", "bin": random.bytes(size), "cls": str(number % 10).encode()}


def _json_row(random: numpy.random.Generator, number: int) -> dict[str, Any]:
    return {"id": number, "text": "ä" * int(random.integers(0, 200)), "x": float(random.random())}


def _text_row(random: numpy.random.Generator, number: int) -> str:
    return f"{number} " + "word é " * int(random.integers(0, 40))


def _parquet_row(random: numpy.random.Generator, number: int) -> dict[str, Any]:
    weight = float(numpy.float32(random.random()))
    return {"id": number, "weight": weight, "vector": random.random(8, numpy.float32), "name": f"name {number}"}


def _hdf5_row(random: numpy.random.Generator, number: int) -> dict[str, Any]:
    return {"group/picture": random.integers(0, 255, (12, 12), dtype=numpy.uint8), "label": number}


MAKERS: dict[str, tuple[Callable[[numpy.random.Generator, int], Any], Callable[[Path, Any], object]]] = {
    "tar": (_tar_row, write_tar),
    "jsonl": (_json_row, lambda file, rows: file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))),
    "text": (_text_row, lambda file, rows: file.write_text("".join(f"{row}\n" for row in rows))),
    "parquet": (_parquet_row, write_parquet),
    "hdf5": (_hdf5_row, write_hdf5),
    "tfrecord": (_tfrecord_row, write_tfrecord),
}


def assert_same(found: Any, expected: Any) -> None:
    """Equal values of equal types; arrays by their bytes."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, numpy.ndarray):
        assert found.dtype == expected.dtype
        numpy.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def same(one: Any, other: Any) -> bool:
    """Whether samples or batches are equal in every type, shape and value."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray | numpy.generic):
        return bool(one.dtype == other.dtype and numpy.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def write_indexed(kind: str, folder: Path, **options: Any) -> Written:
    """Shards with their index beside them."""
    written = write_shards(kind, folder, **options)
    save_index(build_index(str(folder)), folder / NAME)
    return written


def in_child(work: Callable[[], bool]) -> Callable[[], int]:
    """Begin a process that ends with 0 if the work gives True; how it has ended, when it has."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
