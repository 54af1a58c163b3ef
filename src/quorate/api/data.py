"""What can be done with data in shards: index, verify and count them."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from quorate.core.addresses import is_url, normalised, shown
from quorate.core.errors import RequestError
from quorate.history.streaming import shown_place
from quorate.shards.files import shard_place
from quorate.shards.index import NAME, ShardIndex, load_index, save_index
from quorate.shards.indexing import Flaw, Progress, build_index, verify_shards
from quorate.storage.objects import ObjectMissing, open_store

LARGE_BLOCK = 128_000_000
_FEW = 3


@dataclass(frozen=True)
class Indexed:
    """An index that was made, the file or URL that it was written to, and how long it took."""

    index: ShardIndex
    file: str
    seconds: float

    def document(self) -> dict[str, Any]:
        """As `quorate data index --json` prints it."""
        return _head(self.index) | {
            "index": shown_place(self.file),
            "bytes": int(self.index.sizes.sum()),
            "digest": self.index.digest,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Verified:
    """An index and all that is not as it says."""

    index: ShardIndex
    flaws: tuple[Flaw, ...]

    @property
    def damaged_shards(self) -> int:
        """Of those that were indexed."""
        return len({flaw.file for flaw in self.flaws if not flaw.is_new})

    @property
    def new_shards(self) -> int:
        return sum(flaw.is_new for flaw in self.flaws)

    @property
    def damaged_records(self) -> int:
        return sum(flaw.records for flaw in self.flaws)

    def document(self) -> dict[str, Any]:
        """As `quorate data verify --json` prints it."""
        names = ("file", "unit", "start", "length", "records", "problem")
        flaws = [{name: getattr(flaw, name) for name in names} for flaw in self.flaws]
        return _head(self.index) | {
            "damaged_shards": self.damaged_shards,
            "damaged_records": self.damaged_records,
            "new_shards": self.new_shards,
            "flaws": [flaw if flaw["start"] is not None else flaw | {"unit": None} for flaw in flaws],
        }


def _head(index: ShardIndex) -> dict[str, Any]:
    return {
        "place": shown_place(index.place),
        "kind": index.kind,
        "shards": len(index.shards),
        "blocks": index.blocks,
        "records": len(index),
    }


@dataclass(frozen=True)
class Spread:
    """The least, the middle and the most of some numbers."""

    min: int
    median: int
    max: int

    @classmethod
    def of(cls, numbers: numpy.ndarray) -> "Spread":
        return cls(int(numbers.min()), int(numpy.sort(numbers)[len(numbers) // 2]), int(numbers.max()))


@dataclass(frozen=True)
class Stats:
    """What an index says of its shards."""

    index: ShardIndex
    bytes: int
    shard_bytes: Spread
    shard_records: Spread
    block_bytes: Spread | None
    block_records: Spread

    def document(self) -> dict[str, Any]:
        """As `quorate data stats --json` prints it."""
        spreads = {
            name: getattr(self, name) for name in ("shard_bytes", "shard_records", "block_bytes", "block_records")
        }
        return _head(self.index) | {
            "bytes": self.bytes,
            **{name: None if each is None else asdict(each) for name, each in spreads.items()},
            "schema": dict(self.index.schema),
            "digest": self.index.digest,
        }


def index_data(
    place: str, output: str | None = None, *, force: bool = False, progress: Progress | None = None
) -> Indexed:
    """Index the shards in a folder or under a URL.

    Only if forced, an index that is there is replaced, and one is made over folders that have indexes of their own.
    """
    began = time.monotonic()
    for each in (place, output or ""):
        if is_url(each):
            from quorate.stores.objects import refuse_unknown_store

            refuse_unknown_store(each)
    place = normalised(place).rstrip("/") if is_url(place) else str(Path(place).expanduser().absolute())
    file = f"{place}/{NAME}" if output is None else normalised(output)
    if output is not None and not is_url(output):
        file = str(Path(output).expanduser().absolute())
    if not file.endswith(Path(NAME).suffix):
        raise RequestError(f"{shown(file)} is not a name for an index: it must end with {Path(NAME).suffix}")
    if not force:
        _refuse_indexes_below(place)
    if not force and _exists(file):
        raise RequestError(
            f"{shown(file)} already exists. `quorate data verify` compares it with the shards; --force rebuilds it."
        )
    index = build_index(place, _root(place, file), progress)
    try:
        save_index(index, file)
    except OSError as error:
        raise RequestError(
            f"{file} cannot be written: {error.strerror}. --output FILE{Path(NAME).suffix} writes it elsewhere."
        ) from None
    return Indexed(index, file, time.monotonic() - began)


def verify_data(place: str, progress: Progress | None = None) -> Verified:
    """Read all shards of an index through."""
    index = load_index(place)
    return Verified(index, verify_shards(index, progress))


def data_stats(place: str) -> Stats:
    """Count what is in the shards, by the index alone."""
    index = load_index(place)
    shards = index.first[index.first_block]
    return Stats(
        index=index,
        bytes=int(index.sizes.sum()),
        shard_bytes=Spread.of(index.sizes),
        shard_records=Spread.of(numpy.diff(shards)),
        block_bytes=None if index.kind == "hdf5" else Spread.of(index.length),
        block_records=Spread.of(index.records),
    )


def _refuse_indexes_below(place: str) -> None:
    """One index over folders that have their own would mix what they keep apart."""
    below = [name for name in sorted(shard_place(place).list()) if name.endswith(f"/{NAME}")]
    if below:
        named = ", ".join(below[:_FEW]) + (f" and {len(below) - _FEW:,} more" if len(below) > _FEW else "")
        folder = below[0].removesuffix(f"/{NAME}")
        raise RequestError(
            f"{shown(place)} has folders with an index of their own ({named}), and one of all would mix their records, "
            f"such as those for training with those for validation. Index each folder by itself, such as "
            f"{shown(place)}/{folder}; --force makes one of all of them."
        )


def _exists(file: str) -> bool:
    if not is_url(file):
        return Path(file).exists()
    parent, _, name = file.rpartition("/")
    try:
        open_store(parent).size(name)
    except ObjectMissing:
        return False
    return True


def _root(place: str, file: str) -> str:
    """Where the shards lie as seen from the index; a folder below it is still found when both are moved."""
    beside = file.rpartition("/")[0]
    if beside == place:
        return ""
    if is_url(file) and not is_url(place):
        raise RequestError(f"{shown(file)}: an index in a store cannot be of shards in a folder of this machine.")
    if not is_url(place) and place.startswith(f"{beside}/"):
        return place.removeprefix(f"{beside}/")
    return place
