"""Reading shards through: what is no longer as it was indexed, by file and place."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import xxhash

from quorate.core.addresses import is_url
from quorate.data.shards.fetching import Fetcher, StoreAway, Unreachable
from quorate.data.shards.files import ShardPlace, shard_place
from quorate.data.shards.formats.format import Format, ShardFile
from quorate.data.shards.formats.kinds import format_of, kind_of
from quorate.data.shards.index import ShardIndex
from quorate.data.shards.indexing import LOCAL_THREADS, REMOTE_THREADS, Progress, digest_of
from quorate.data.shards.patient import opened


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
    threads = REMOTE_THREADS if is_url(index.place) else LOCAL_THREADS
    flaws: list[Flaw] = []

    def examined(shard: int) -> list[Flaw]:
        return _examined(index, shard, format, files, sizes, fetcher)

    with closing(Fetcher(is_url(index.place))) as fetcher, ThreadPoolExecutor(threads, "verify") as pool:
        try:
            for done, found in enumerate(pool.map(examined, range(len(index.shards))), 1):
                flaws += found
                if progress is not None:
                    progress(done, len(index.shards))
        except BaseException:
            # Whoever waits for another try must not be waited for.
            fetcher.close()
            pool.shutdown(cancel_futures=True)
            raise
    known = set(index.shards)
    extra = [name for name in sorted(sizes) if kind_of(name) is not None and name not in known]
    return (*flaws, *(Flaw(name, "is not in the index", is_new=True) for name in extra))


def _examined(
    index: ShardIndex,
    shard: int,
    format: Format,
    files: ShardPlace,
    sizes: Mapping[str, int | None],
    fetcher: Fetcher,
) -> list[Flaw]:
    name = index.shards[shard]
    first, behind = (int(index.first[index.first_block[each]]) for each in (shard, shard + 1))
    size = sizes.get(name)
    if size is None:
        problem = "is a link that leads nowhere" if name in sizes else "is missing"
    else:
        try:
            with opened(files, name, size, fetcher) as file:
                return list(_flaws(index, shard, format, file))
        except FileNotFoundError:
            problem = "is missing"
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        except StoreAway:
            raise  # which says nothing about this shard, and of the next ones there is no more to learn
        except Unreachable as error:
            problem = error.message.removeprefix(f"{name} ").rstrip(".")
    return [Flaw(name, problem, records=behind - first)]


def _flaws(index: ShardIndex, shard: int, format: Format, file: ShardFile) -> Iterator[Flaw]:
    expected = int(index.sizes[shard])
    if file.size != expected:
        yield Flaw(file.name, f"has {file.size:,} bytes, and had {expected:,} when it was indexed")
    tail = int(index.tails[shard])
    is_same_tail = file.size == expected and digest_of(file, tail) == index.tail_digests[shard].tobytes()
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
        problem = "cannot be read any more"
    else:
        problem = f"has changed: its digest is {found.hex()}, and was {expected.hex()}"
    yield Flaw(file.name, problem, format.unit, block.start, block.length, block.records)
