"""Shards that are read through: to make their index, and to find what is no longer as it was indexed."""

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy
import xxhash

from quorate.core.addresses import is_url, normalised, shown
from quorate.core.errors import RequestError
from quorate.data.bad_sample import Unreachable
from quorate.shards.fetching import Fetcher, StoreAway
from quorate.shards.files import shard_place
from quorate.shards.formats.format import BLOCK, BadRecord, Format, ShardFile
from quorate.shards.formats.kinds import ENDINGS, format_of, is_compressed_shard, kind_of
from quorate.shards.index import ARRAYS, DIGEST, NAME, ShardIndex, save_index
from quorate.storage.objects import ObjectMissing, open_store

LOCAL_THREADS = 2 * (os.cpu_count() or 1)
REMOTE_THREADS = 16
_FEW = 3
# What puts the unpacked file in the place of the packed one.
_UNPACKERS = {".gz": "gunzip", ".tgz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd --rm"}

Progress = Callable[[int, int], None]
Found = TypeVar("Found")


def index_data(
    place: str, output: str | None = None, *, force: bool = False, progress: Progress | None = None
) -> tuple[ShardIndex, str]:
    """Index the shards in a folder or under a URL; the index, and the file or URL that it was written to.

    Only if forced, an index that is there is replaced, and one is made over folders that have indexes of their own.
    """
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
    return index, file


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


def build_index(place: str, root: str = "", progress: Progress | None = None) -> ShardIndex:
    """Index the shards in a folder or under a URL. `progress` is told how many shards are done, of how many.

    `root` is where they lie as seen from the index, if not beside it.
    """
    files = shard_place(place)
    sizes = files.list()
    kind, names = _shards_among(place, sizes)
    format = format_of(kind)

    def index_shard(name: str, fetcher: Fetcher) -> ShardIndex:
        try:
            with files.open(name, sizes[name]) as file:
                return _index_shard(format, _retrying(file, fetcher))
        except BadRecord as error:
            raise RequestError(f"{error.message}. Repair or remove this shard.") from None
        except OSError as error:
            raise RequestError(f"{name} cannot be read: {error.strerror or error}.") from None

    indexed = list(_each(place, names, index_shard, progress))
    arrays = {name: numpy.concatenate([getattr(each, name) for each in indexed]) for name in ARRAYS}
    arrays["shard_of_block"] = numpy.repeat(numpy.arange(len(indexed)), [each.blocks for each in indexed])
    index = ShardIndex(kind, _schema(format, indexed), names, **arrays, root=root, place=place)
    if not len(index):
        raise RequestError(f"{shown(place)}: the {len(names):,} {kind} shards there have no record at all.")
    return index


def _shards_among(place: str, names: Mapping[str, int | None]) -> tuple[str, tuple[str, ...]]:
    """The kind of the shards among some files, and their names in order; other files are left out."""
    lost = [name for name in sorted(names) if names[name] is None]
    if lost:  # which may stand for a shard or for a folder of them
        raise RequestError(
            f"{shown(place)}/{lost[0]} is a link that leads nowhere, so nobody can say what is to be indexed there. "
            "Restore what it leads to, or remove the link."
        )
    found = {name: kind_of(name) for name in sorted(names) if Path(name).name != NAME}
    shards = {name: kind for name, kind in found.items() if kind is not None}
    compressed = [name for name in found if is_compressed_shard(name)]
    if compressed:
        raise RequestError(
            f"{shown(place)}/{compressed[0]} is compressed as a whole, so that no block of it can be read by itself. "
            f"{_unpacking(place, compressed[0])}; what a shard holds may be compressed, such as pictures."
        )
    if not shards:
        raise RequestError(
            f"{shown(place)} has no shards: none of its {len(found):,} files ends with {', '.join(ENDINGS)}."
        )
    counts = Counter(shards.values())
    if len(counts) > 1:
        examples = [next(name for name in shards if shards[name] == kind) for kind in sorted(counts)]
        raise RequestError(
            f"{shown(place)} has shards of several kinds, such as {' and '.join(examples)}. Put those of each kind "
            "into a folder of their own."
        )
    for name in shards:
        if "\n" in name or not name.isprintable():
            raise RequestError(f"{shown(place)} has a shard whose name cannot be listed: {name!r}. Rename it.")
    return next(iter(counts)), tuple(shards)


def _unpacking(place: str, name: str) -> str:
    command = _UNPACKERS.get(Path(name.lower()).suffix)
    if command is None or is_url(place):
        return "Have it there unpacked, and not packed"
    return f"Unpack it with: {command} {shlex.quote(f'{place}/{name}')}"


def _each(
    place: str, names: Sequence[str], work: Callable[[str, Fetcher], Found], progress: Progress | None
) -> Iterator[Found]:
    """What is found of every shard, in order, by several threads; the first that raises ends it all."""
    threads = REMOTE_THREADS if is_url(place) else LOCAL_THREADS
    with (
        closing(Fetcher(is_url(place))) as fetcher,
        ThreadPoolExecutor(max(1, min(threads, len(names))), "shards") as pool,
    ):
        try:
            for done, found in enumerate(pool.map(lambda name: work(name, fetcher), names), 1):
                yield found
                if progress is not None:
                    progress(done, len(names))
        except BaseException:
            # Whoever waits for another try must not be waited for.
            fetcher.close()
            pool.shutdown(cancel_futures=True)
            raise


def _retrying(file: ShardFile, fetcher: Fetcher) -> ShardFile:
    """The same, of which every read is tried again where that may help; `Unreachable` where it does not."""

    def read(start: int, length: int) -> bytes:
        return fetcher.fetch(file.name, lambda: file.read(start, length), length)

    return replace(file, read=read)


def _index_shard(format: Format, file: ShardFile) -> ShardIndex:
    """The index of one shard, which is read through."""
    fields: dict[str, str] = {}
    found = [(block, xxhash.xxh3_128_digest(content)) for block, content in format.scan(file, fields)]
    blocks = [block for block, _ in found]
    tail = blocks[-1].start + blocks[-1].length if blocks and format.unit == "byte" else 0
    digests = b"".join(digest for _, digest in found) + _digest_of(file, tail)
    of_blocks = numpy.frombuffer(digests, numpy.uint8).reshape(-1, DIGEST)
    return ShardIndex(
        format.kind,
        fields,
        (file.name,),
        sizes=numpy.array([file.size]),
        tails=numpy.array([tail]),
        tail_digests=of_blocks[-1:],
        shard_of_block=numpy.zeros(len(blocks), numpy.int64),
        start=numpy.array([block.start for block in blocks], numpy.int64),
        length=numpy.array([block.length for block in blocks], numpy.int64),
        records=numpy.array([block.records for block in blocks], numpy.int64),
        digests=of_blocks[:-1],
    )


def _digest_of(file: ShardFile, start: int) -> bytes:
    """Of all bytes of a file from there."""
    digest = xxhash.xxh3_128()
    while start < file.size:
        content = file.read(start, min(BLOCK, file.size - start))
        if not content:
            break
        digest.update(content)
        start += len(content)
    return digest.digest()


def _schema(format: Format, indexed: Sequence[ShardIndex]) -> dict[str, str]:
    """The fields of all shards; where all must be alike, one that is not is named."""
    if not format.alike:
        return dict(sorted({name: kind for each in reversed(indexed) for name, kind in each.schema.items()}.items()))
    schema = dict(indexed[0].schema)
    for each in indexed:
        if each.schema != schema:
            wrong = next(name for name in {**schema, **each.schema} if schema.get(name) != each.schema.get(name))
            mine, first = each.schema.get(wrong, "not there"), schema.get(wrong, "not there")
            raise RequestError(
                f"{each.shards[0]} has another schema than {indexed[0].shards[0]}: {wrong} is {mine}, and {first} in "
                "the first. All shards of a dataset must have the same columns of the same types."
            )
    return schema


@dataclass(frozen=True)
class Flaw:
    """Something that is not as it was indexed: a file, or a part of it that begins at byte or row `start`.

    `records` is how many it takes away. `is_new`: nothing is wrong with what was indexed, this came later.
    """

    file: str
    problem: str
    unit: str = "byte"
    start: int | None = None
    length: int | None = None
    records: int = 0
    is_new: bool = False

    @property
    def place(self) -> str:
        """Where in the file; empty if it is about all of it."""
        if self.start is None or self.length is None:
            return ""
        return f"{self.unit}s {self.start} to {self.start + self.length}"


def verify_shards(index: ShardIndex, progress: Progress | None = None) -> tuple[Flaw, ...]:
    """Read every shard of an index through; shards that are not in it are flaws too.

    `StoreAway` if the store that they are in does not answer any more.
    """
    files = shard_place(index.place)
    sizes = files.list()
    format = format_of(index.kind)
    numbers = {name: shard for shard, name in enumerate(index.shards)}

    def examine(name: str, fetcher: Fetcher) -> list[Flaw]:
        shard, size = numbers[name], sizes.get(name)
        try:
            if size is None:
                problem = "is a link that leads nowhere" if name in sizes else "is missing"
            else:
                with files.open(name, size) as file:
                    return list(_flaws(index, shard, format, _retrying(file, fetcher)))
        except FileNotFoundError:
            problem = "is missing"
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        except StoreAway:
            raise  # which says nothing about this shard, and of the next ones there is no more to learn
        except Unreachable as error:
            problem = error.message.removeprefix(f"{name} ").rstrip(".")
        first, behind = (int(index.first[index.first_block[each]]) for each in (shard, shard + 1))
        return [Flaw(name, problem, records=behind - first)]

    flaws = [flaw for found in _each(index.place, index.shards, examine, progress) for flaw in found]
    extra = [name for name in sorted(sizes) if kind_of(name) is not None and name not in numbers]
    return (*flaws, *(Flaw(name, "is not in the index", is_new=True) for name in extra))


def _flaws(index: ShardIndex, shard: int, format: Format, file: ShardFile) -> Iterator[Flaw]:
    expected = int(index.sizes[shard])
    if file.size != expected:
        yield Flaw(file.name, f"has {file.size:,} bytes, and had {expected:,} when it was indexed")
    tail = int(index.tails[shard])
    is_same_tail = file.size == expected and _digest_of(file, tail) == index.tail_digests[shard].tobytes()
    if format.unit == "row" and is_same_tail:
        return  # every byte is what it was, and so is every row
    blocks = range(int(index.first_block[shard]), int(index.first_block[shard + 1]))
    flaws = [flaw for number in blocks for flaw in _flaws_of_block(index, number, format, file)]
    yield from flaws
    # Of a file of another size, or of rows, the rest is told of only where nothing else is wrong.
    if not is_same_tail and file.size == expected and not (format.unit == "row" and flaws):
        yield Flaw(file.name, "has changed outside of the records", "byte", tail, expected - tail)


def _flaws_of_block(index: ShardIndex, number: int, format: Format, file: ShardFile) -> Iterator[Flaw]:
    block = index.block(number)
    content = format.read(file, block)
    found, expected = xxhash.xxh3_128_digest(content), index.digests[number].tobytes()
    if found == expected:
        return
    if format.unit == "byte" and len(content) < block.length:
        problem = f"is cut off after {len(content):,} of {block.length:,} bytes"
    elif not content:
        problem = "can no longer be read"
    else:
        problem = f"has changed: its digest is {found.hex()}, and was {expected.hex()}"
    yield Flaw(file.name, problem, format.unit, block.start, block.length, block.records)
