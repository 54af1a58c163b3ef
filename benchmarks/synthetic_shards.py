"""Data in shards of any size, made quickly: a few distinct row groups and pictures, repeated, and copies of one file.

Nothing of Quorate's reading is imported here: the peers read the same files.
"""

import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy

KINDS = ("parquet", "tar")
BATCH = {"parquet": 8192, "tar": 256}
"""Samples of a batch: about 8 MB of rows, and 2 MB of pictures."""

SHARD = 100 * 2**20
FEWEST_SHARDS = 4
FEATURES = 256
ROWS_IN_GROUP = 4096
DISTINCT_GROUPS = 4
SIDE = 64
DISTINCT_PICTURES = 64
_SEED = 5


def provide(folder: Path, kind: str, size: int) -> Path:
    """A folder with shards of a kind, of about so many bytes in all; made if it is not there yet."""
    place = folder / f"{kind}-{size}"
    if place.exists():
        return place
    shards = max(FEWEST_SHARDS, round(size / SHARD))
    # Made aside and moved when it is whole: a script that was ended halfway leaves nothing that looks like data.
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / kind
        made.mkdir()
        first = made / f"shard-00000.{kind}"
        _WRITERS[kind](first, size // shards)
        for number in range(1, shards):
            # A true copy, not a link: every byte is read from a file of its own.
            shutil.copyfile(first, made / f"shard-{number:05d}.{kind}")
        made.rename(place)
    return place


def shards_in(place: Path, most: int | None = None) -> list[Path]:
    """The shards in a folder, or the first ones: at least one, and no more than so many bytes otherwise."""
    files: list[Path] = []
    taken = 0
    for file in sorted(place.glob("shard-*")):
        taken += file.stat().st_size
        if most is not None and files and taken > most:
            break
        files.append(file)
    return files


def decoded(record: Mapping[str, Any]) -> tuple[Any, int]:
    """What a task makes of a record of a tar file: pixels and a number. The same for everybody who reads them."""
    import torch
    from PIL import Image

    with Image.open(io.BytesIO(record["png"])) as picture:
        return torch.from_numpy(numpy.array(picture)), int(record["cls"])


def _write_parquet(file: Path, size: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    random = numpy.random.default_rng(_SEED)
    tables = []
    for _ in range(DISTINCT_GROUPS):
        numbers = random.standard_normal(ROWS_IN_GROUP * FEATURES, dtype=numpy.float32)
        features = pa.FixedSizeListArray.from_arrays(pa.array(numbers), FEATURES)
        tables.append(pa.table({"features": features, "label": random.integers(0, 10, ROWS_IN_GROUP)}))
    # Numbers of this kind cannot be compressed, and have hardly two that are equal.
    with parquet.ParquetWriter(file, tables[0].schema, use_dictionary=False) as writer:
        for number in range(max(1, size // (ROWS_IN_GROUP * (FEATURES * 4 + 8)))):
            writer.write_table(tables[number % DISTINCT_GROUPS], row_group_size=ROWS_IN_GROUP)


def _write_tar(file: Path, size: int) -> None:
    pictures = list(_pictures())
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as opened:
        number = 0
        while opened.offset < size:
            _add(opened, f"{number:08d}.png", pictures[number % DISTINCT_PICTURES])
            _add(opened, f"{number:08d}.cls", str(number % 10).encode())
            number += 1


def _add(opened: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    opened.addfile(member, io.BytesIO(content))


def _pictures() -> Iterator[bytes]:
    """PNG files of 64×64 pixels: colours that run into each other, and some noise, as photographs have them."""
    from PIL import Image

    random = numpy.random.default_rng(_SEED)
    for _ in range(DISTINCT_PICTURES):
        corners = random.integers(0, 255, (4, 4, 3), dtype=numpy.uint8)
        smooth = numpy.asarray(Image.fromarray(corners).resize((SIDE, SIDE), Image.Resampling.BICUBIC), numpy.int16)
        noisy = (smooth + random.integers(-8, 9, smooth.shape)).clip(0, 255).astype(numpy.uint8)
        content = io.BytesIO()
        Image.fromarray(noisy).save(content, "png")
        yield content.getvalue()


_WRITERS = {"parquet": _write_parquet, "tar": _write_tar}
