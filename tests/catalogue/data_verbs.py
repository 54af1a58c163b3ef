"""Mistakes with data in shards."""

import io
import tarfile
from pathlib import Path

from catalogue.case import Case, Prepare
from command import Workplace
from quorate.shards.index import NAME, save_index
from quorate.shards.indexing import build_index

WORDS = {"a.txt": b"one\ntwo\n", "b.txt": b"three\n"}


def tar_of(*names: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as opened:
        for name in names:
            opened.addfile(tarfile.TarInfo(name), io.BytesIO())
    return content.getvalue()


def files(contents: dict[str, bytes], *, indexed: bool = False, damaged: bool = False) -> Prepare:
    """Have a folder `photos` with these files, and perhaps an index."""

    def prepare(workplace: Workplace) -> None:
        folder = workplace.folder / "photos"
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        if indexed:
            save_index(build_index(str(folder)), folder / NAME)
        if damaged:
            cut_off(folder / NAME)

    return prepare


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


INDEX = "quorate data index photos"
CASES = (
    Case("A folder of shards that is not there", command="quorate data index phtos"),
    Case("A file in place of a folder", command="quorate data index photos/a.txt", prepare=files(WORDS)),
    Case(
        "A folder without shards",
        command=INDEX,
        story="`photos` has 0001.jpg and labels.csv.",
        prepare=files({"0001.jpg": b"", "labels.csv": b""}),
    ),
    Case(
        "Shards of two kinds in a folder",
        command=INDEX,
        story="`photos` has a.tar and b.jsonl.",
        prepare=files({"a.tar": tar_of("1.jpg"), "b.jsonl": b"{}\n"}),
    ),
    Case(
        "Shards that are compressed as a whole",
        command=INDEX,
        story="`photos` has a.tar.gz.",
        prepare=files({"a.tar.gz": b""}),
    ),
    Case(
        "A shard that was cut off",
        command=INDEX,
        story="Of b.tar only the first 200 bytes are left.",
        prepare=files({"a.tar": tar_of("1.jpg"), "b.tar": tar_of("2.jpg")[:200]}),
    ),
    Case(
        "A tar with two files for one field of a record",
        command=INDEX,
        story="a.tar has 1.jpg twice.",
        prepare=files({"a.tar": tar_of("1.jpg", "1.jpg")}),
    ),
    Case(
        "An index that is there already",
        command=INDEX,
        story="`photos` has index.quorate.",
        prepare=files(WORDS, indexed=True),
    ),
    Case(
        "Folders that have indexes of their own",
        command=INDEX,
        story="`photos/train` and `photos/validation` were indexed.",
        prepare=files({f"{name}/{each}": b"" for name in ("train", "validation") for each in ("a.txt", NAME)}),
    ),
    Case("Shards without an index", command="quorate data verify photos", prepare=files(WORDS)),
    Case(
        "An index that is damaged",
        command="quorate data stats photos",
        story="The last byte of photos/index.quorate is lost.",
        prepare=files(WORDS, indexed=True, damaged=True),
    ),
    Case("A verb that is gone", command="quorate data preview photos"),
)
