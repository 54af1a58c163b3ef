"""Raw images in shards: bytes that need no decoding, in Parquet where pyarrow is there, and in tar files where not.

In Parquet they are a column of binary: of a list of uint8 each byte would be kept as a number of 32 bits.
"""

import importlib.util
import io
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

import quorate
from benchmarks.models import MODELS
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index

sys.path.append(str(MODELS))

from images import synthetic_images
from resnet import ResNetImageNet

POOL = 256
"""Distinct images; they are written over and over."""
SHARDS = 8


class RawResNet(ResNetImageNet):
    """ResNet over shards whose records have the bytes of an `image` and a `label`."""

    def datasets(self) -> Any:
        def decode(record: dict[str, Any]) -> tuple[torch.Tensor, int]:
            image = torch.frombuffer(bytearray(record["image"]), dtype=torch.uint8)
            return image.reshape(3, self.side, self.side), int(record["label"])

        return tuple(quorate.Shards(self.data / part, decode=decode) for part in ("train", "validation"))


def has_pyarrow() -> bool:
    """Whether Parquet can be written and read here."""
    return importlib.util.find_spec("pyarrow") is not None


def sharded(job: dict[str, Any], folder: Path, count: int) -> dict[str, Any]:
    """The job, reading so many images of its size from shards; these are made if they are not there yet."""
    side, classes = (job["params"].get(name, usual) for name, usual in (("side", 224), ("classes", 1000)))
    is_parquet = has_pyarrow()
    place = folder / f"images-{'binary' if is_parquet else 'tar'}-{count}-{side}"
    if not place.exists():
        # Made aside and moved when it is whole: what was ended halfway does not look like data.
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / place.name
            for part, images in (("train", count), ("validation", POOL)):
                (made / part).mkdir(parents=True)
                _write(made / part, images, side, classes, is_parquet)
                save_index(build_index(str(made / part)), made / part / NAME)
            made.rename(place)
    return job | {"task": "benchmarks.raw_images:RawResNet", "params": job["params"] | {"data": str(place)}}


def _write(folder: Path, count: int, side: int, classes: int, is_parquet: bool) -> None:
    images, labels = synthetic_images(POOL, side, classes, seed=1).dataset.tensors  # type: ignore[attr-defined]
    for shard in range(SHARDS):
        rows = torch.arange(shard, count, SHARDS) % POOL
        write = _write_parquet if is_parquet else _write_tar
        write(folder / f"shard-{shard}", images[rows], labels[rows])


def _write_parquet(file: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    import pyarrow
    from pyarrow import parquet

    content = [None, pyarrow.py_buffer(images.numpy().tobytes())]
    binary = pyarrow.FixedSizeBinaryArray.from_buffers(pyarrow.binary(images[0].nbytes), len(images), content)
    columns = {"image": binary, "label": labels.numpy()}
    # Groups of a few MB: what is read at the same time is held in memory.
    rows = max(1, 4 * 2**20 // images[0].nbytes)
    parquet.write_table(
        pyarrow.table(columns), f"{file}.parquet", row_group_size=rows, compression="none", use_dictionary=False
    )


def _write_tar(file: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    with tarfile.open(f"{file}.tar", "w", format=tarfile.USTAR_FORMAT) as opened:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            for ending, content in (("image", image.numpy().tobytes()), ("label", str(int(label)).encode())):
                member = tarfile.TarInfo(f"{number:08d}.{ending}")
                member.size = len(content)
                opened.addfile(member, io.BytesIO(content))
