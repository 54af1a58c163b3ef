"""Makes data in shards for the examples: handwritten digits as Parquet files, and as pictures in tar files.

::

    python scripts/shards.py                          both, into data/ beside examples/
    python scripts/shards.py digits-tar               one of them
    python scripts/shards.py --to /big/disk           somewhere else

The digits are those of scikit-learn, 8×8 pixels; each is drawn several times at 28×28 pixels, turned, stretched and
moved a little. Digits that are drawn for validation are never drawn for training. The same call writes the same files.
"""

import argparse
import io
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import affine_grid, grid_sample

USUAL = Path(__file__).resolve().parents[1] / "data"
SIDE = 28
SHARDS = {"train": 8, "validation": 2}
HELD_OUT = 0.2
ROWS_IN_GROUP = 512
SEED = 7


class ShardsError(Exception):
    """Data that cannot be made here. Its text says what to do."""


@dataclass(frozen=True)
class Pictures:
    """Pictures of digits, and which digits they are."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def shares(self, count: int) -> Iterator["Pictures"]:
        """So many parts of about the same size."""
        parts = zip(self.pixels.tensor_split(count), self.labels.tensor_split(count), strict=True)
        return (Pictures(pixels, labels) for pixels, labels in parts)


def draw(digits: int | None, copies: int) -> dict[str, Pictures]:
    """The first so many digits, or all: each drawn so many times, the pictures shuffled."""
    found = _imported("sklearn.datasets", "scikit-learn").load_digits(return_X_y=True)
    pixels, labels = (torch.tensor(part[:digits]) for part in found)
    small = pixels.float().view(-1, 1, 8, 8) * (255 / 16)
    generator = torch.Generator().manual_seed(SEED)
    held_out = int(len(small) * HELD_OUT)
    order = torch.randperm(len(small), generator=generator)
    chosen = {"train": order[held_out:].repeat(copies), "validation": order[:held_out]}
    drawn = {}
    for part, digit in chosen.items():
        digit = digit[torch.randperm(len(digit), generator=generator)]
        drawn[part] = Pictures(_drawn(small[digit], generator), labels[digit])
    return drawn


def _drawn(small: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turned by up to 15 degrees, stretched by up to a tenth, moved by up to two pixels."""
    count = len(small)

    def by_chance(most: float) -> torch.Tensor:
        return (torch.rand(count, generator=generator) * 2 - 1) * most

    angle, wide, high = by_chance(0.26), 1.15 + by_chance(0.1), 1.15 + by_chance(0.1)
    rows = (
        torch.stack([angle.cos() * wide, -angle.sin() * high, by_chance(0.15)], 1),
        torch.stack([angle.sin() * wide, angle.cos() * high, by_chance(0.15)], 1),
    )
    grid = affine_grid(torch.stack(rows, 1), [count, 1, SIDE, SIDE], align_corners=False)
    large = grid_sample(small, grid, align_corners=False)
    return large.squeeze(1).clamp(0, 255).to(torch.uint8)


def write_parquet(file: Path, pictures: Pictures, first: int) -> None:  # noqa: ARG001 (rows have no names)
    """A file with the columns `picture` (28×28 bytes) and `digit`."""
    pa, parquet = _imported("pyarrow", "pyarrow"), _imported("pyarrow.parquet", "pyarrow")
    picture = pa.FixedShapeTensorArray.from_numpy_ndarray(pictures.pixels.numpy())
    table = pa.table({"picture": picture, "digit": pictures.labels.numpy()})
    parquet.write_table(table, file, row_group_size=ROWS_IN_GROUP)


def write_tar(file: Path, pictures: Pictures, first: int) -> None:
    """A file with 000123.png and 000123.cls for each picture."""
    image = _imported("PIL.Image", "pillow")
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as opened:
        for number, (pixels, label) in enumerate(zip(pictures.pixels, pictures.labels.tolist(), strict=True), first):
            png = io.BytesIO()
            image.fromarray(pixels.numpy()).save(png, "png")
            for ending, content in (("png", png.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{ending}")
                member.size = len(content)
                opened.addfile(member, io.BytesIO(content))


WRITERS: dict[str, tuple[str, Callable[[Path, Pictures, int], None]]] = {
    "digits-parquet": ("parquet", write_parquet),
    "digits-tar": ("tar", write_tar),
}
DATASETS = tuple(WRITERS)


def make(name: str, to: Path, drawn: dict[str, Pictures]) -> str:
    """Write a dataset into a folder of its name, in place of one that is there; what was written, in a line."""
    ending, write = WRITERS[name]
    to.mkdir(parents=True, exist_ok=True)
    # Written aside and moved when it is whole: an interruption leaves no half of it where a job would read it.
    with tempfile.TemporaryDirectory(dir=to, prefix=f".{name}-") as aside:
        for part, pictures in drawn.items():
            folder = Path(aside) / name / part
            folder.mkdir(parents=True)
            first = 0
            for number, share in enumerate(pictures.shares(SHARDS[part])):
                write(folder / f"{part}-{number:03d}.{ending}", share, first)
                first += len(share.labels)
        shutil.rmtree(to / name, ignore_errors=True)
        (Path(aside) / name).rename(to / name)
    counts = " and ".join(f"{len(pictures.labels):,} for {part}" for part, pictures in drawn.items())
    return f"{name}: {counts} in {_shown(to / name)}"


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ShardsError(f"the package {package} is not here: pip install {package}") from None


def _shown(path: Path) -> str:
    inside = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if inside else path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description="Make data in shards for the examples.")
    parser.add_argument("names", nargs="*", metavar="DATASET", help=f"{' or '.join(DATASETS)} (default: both)")
    parser.add_argument("--to", type=Path, default=USUAL, metavar="FOLDER", help="where to (default: data)")
    parser.add_argument("--digits", type=_count, metavar="N", help="how many digits to draw (default: all 1,797)")
    parser.add_argument("--copies", type=_count, default=12, metavar="N", help="how often each (default: 12)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in DATASETS]
    if unknown:
        parser.error(f"there is no dataset {unknown[0]!r}; there are {' and '.join(DATASETS)}")
    try:
        drawn = draw(given.digits, given.copies)
        for name in given.names or DATASETS:
            print(make(name, given.to.resolve(), drawn), flush=True)
    except ShardsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename} (--to: {given.to})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return count


if __name__ == "__main__":
    sys.exit(main())
