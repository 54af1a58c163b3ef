"""A dataset of files that need not fit into memory: tar, Parquet, JSONL, text or HDF5, in a folder or a store."""

import concurrent.futures
import math
import os
import re
import subprocess
import sys
import urllib.error
from bdb import BdbQuit
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

import numpy
import torch

from quorate.core.addresses import is_url, shown, shown_place
from quorate.core.cached import cached_property
from quorate.core.errors import QuorateError, RequestError, TaskError
from quorate.core.user_code import PACKAGE, describe, given, user_traceback
from quorate.data.bad_sample import COLLATE, SKIP, BadSample
from quorate.data.collate import UnlikeSamples, collate
from quorate.data.datasets import LIMIT
from quorate.data.indices import Indices, indices_of
from quorate.shards.blocks import BlockReader, ShardBlocks
from quorate.shards.decoded_cache import DecodedCache
from quorate.shards.disk_cache import DiskCache
from quorate.shards.formats.format import ColumnRecords, DamagedBlock, ShardError
from quorate.shards.index import NAME, ShardIndex, load_index

MOST_SAMPLES, MOST_BYTES = 8192, 12_000_000
"""What a lane shuffles at a time by default: so many samples, or fewer if they are large."""
COLUMNAR = ("parquet", "hdf5")
"""The kinds of shards that have columns."""
_GB = 1_000_000_000
_CACHE_GB = 10


class Shards:
    """A dataset of records in files (shards), which `quorate data index PATH` has indexed.

    ::

        quorate.Shards("train/", decode=lambda record: (picture(record["jpg"]), int(record["cls"])))

    `path` is a folder, or a URL such as s3://bucket/prefix. A relative path is looked for beside the file that names
    it, then in the working folder. A record is a dict of bytes by file ending (tar), a dict (JSONL), a line (text), a
    dict by column (Parquet, HDF5) or a dict by feature (TFRecord); `decode` turns a record into a sample.

    Without `decode`, batches of Parquet and HDF5 are tensors by column. Records of the other formats are collated as
    they are. A batch of JSONL is a dict by field: numbers become a tensor, strings a list, and lists of equal length a
    list of batches, one for each position in them; all records need the same fields, and none may be null. A batch of
    tar is a dict by file ending with lists of bytes, and `__key__` has the list of keys. A batch of text is a list of
    lines.

    `columns` selects columns. `window` is the number of samples that are shuffled at a time: a larger one mixes better
    and needs more memory. `cache={"folder": PATH, "gb": 20}` caches on a local disk what was read from a store, and the
    samples that `decode` has made unless it draws random numbers; "gb" is 10 by default. A cache with `decode` needs
    `cache_key`, a string such as "v1" for the version of `decode`: cached samples are used only under the same key, so
    change it whenever `decode` or anything that it depends on has changed.
    """

    is_read_by_blocks = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        decode: Callable[[Any], Any] | None = None,
        columns: Sequence[str] | None = None,
        window: int | None = None,
        cache: Mapping[str, Any] | None = None,
        cache_key: str | None = None,
    ) -> None:
        place = _placed(path)
        self.index = load_index(place)
        self.index_path = shown(_index_path(place))
        self._decode = _checked_decode(decode)
        self.has_decode = decode is not None
        self._columns = _checked_columns(columns, self.index)
        self.fingerprint = f"{self.index.digest} {','.join(self._columns or ['*'])}"
        self.window = _checked_window(window, self.index)
        self._cache = _checked_cache(cache)
        self.cache_key = _checked_cache_key(cache_key, needed=self._cache is not None and decode is not None)
        self.blocks: Indices = self.index.records
        self._starts: list[int] = self.index.first[:-1].tolist()
        # Bytes of blocks that a process may keep.
        self.limit = LIMIT
        self._begin()

    def _begin(self) -> None:
        self._reader = BlockReader(self._blocks)
        # The samples that `decode` has made, where they are cached.
        self.decoded: DecodedCache | None = None
        if self._cache is not None and self._decode is not None and self.cache_key is not None:
            self.decoded = DecodedCache(self._cache, self.fingerprint, self.cache_key, self.index.records)

    # --- what it has

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        files = f"{len(self.index.shards):,} {self.index.kind} files"
        return f"Shards({shown(self.index.place)!r}: {len(self):,} records in {files})"

    @property
    def reading_facts(self) -> dict[str, Any]:
        """Where it is listed, and what waiting for its samples depends on."""
        size = int(self.index.sizes.sum())
        reading = {
            "remote": is_url(self.index.place),
            "decode": self.has_decode,
            "columns": self.is_columns,
            "cache": self._cache is not None,
            "window_bytes": size * min(self.window, len(self)) // max(1, len(self)),
            "memory_bytes": LIMIT,
        }
        return {"reading": reading, "index": self.index_path, "digest": self.index.digest}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with its cache, as far as this process knows."""
        return () if self._cache is None else tuple(self._cache.notes)

    @cached_property
    def is_columns(self) -> bool:
        """Whether batches come from columns at once, and no code of the task runs for them."""
        return type(self) is Shards and self._decode is None and self.index.kind in COLUMNAR

    # --- samples

    def __getitem__(self, index: int) -> Any:
        """The sample of a record; `BadSample` if the record is damaged or `decode` raises for it."""
        number = range(len(self))[index]
        block = bisect_right(self._starts, number) - 1
        row = number - self._starts[block]
        if self.decoded is not None:
            found, sample = self.decoded.get(block, row)
            if found:
                return sample
        try:
            record = self._record(block, row)
            sample = record if self._decode is None else self._sample(record, block, row)
        except BadSample as error:
            # A damaged block has no sample at all that would be worth a file.
            if self.decoded is not None and not isinstance(error.__context__, DamagedBlock):
                self.decoded.stage(block, row, None, is_bad=True)
            raise
        if self.decoded is not None:
            self.decoded.stage(block, row, sample)
        return sample

    def batch(self, indices: Sequence[int] | Indices) -> dict[str, Any]:
        """What collating these samples would give, made of whole columns."""
        numbers = indices_of(indices)
        of_block = numpy.searchsorted(self.index.first, numbers, side="right") - 1
        parts: list[tuple[Indices, dict[str, Any]]] = []
        for block in dict.fromkeys(of_block.tolist()):
            positions = numpy.flatnonzero(of_block == block)
            try:
                records: ColumnRecords = self._reader.here(self.limit).get(block)
                parts.append((positions, records.columns(numbers[positions] - self._starts[block])))
            except ShardError as error:
                raise self._bad(block, error) from None
        batch = {}
        for name in parts[0][1]:
            try:
                batch[name] = merged([(at, columns[name]) for at, columns in parts], len(numbers))
            except UnlikeSamples as error:
                raise error.within(name) from None
        return batch

    def _record(self, block: int, row: int) -> Any:
        try:
            records = self._reader.here(self.limit).get(block)
            if self._decode is None and isinstance(records, ColumnRecords):
                return {name: rows(column)[0] for name, column in records.columns([row]).items()}
            return records[row]
        except ShardError as error:
            raise self._bad(block, error) from None

    def _sample(self, record: Any, block: int, row: int) -> Any:
        assert self._decode is not None
        try:
            return self._decode(record)
        except Exception as error:
            if is_machine_error(error) or isinstance(error, BdbQuit):
                raise
            told = self.index.block(block)
            where = f"record {told.row + row} of {told.file}"
            hint = f"Fix decode() or the record; {SKIP}"
            raise BadSample(f"{describe(error)} (in decode() of {where})", user_traceback(error), hint) from error

    # --- reading ahead

    def blocks_of(self, indices: Sequence[int] | Indices) -> list[int]:
        """The blocks that these samples are in, each once."""
        found = numpy.searchsorted(self.index.first, indices_of(indices), side="right") - 1
        blocks: list[int] = numpy.unique(found).tolist()
        return blocks

    def prefetch(self, blocks: Sequence[int]) -> None:
        """Read these ahead, in this order."""
        decoded = self.decoded
        wanted = blocks if decoded is None else [block for block in blocks if not decoded.has(block)]
        self._reader.here(self.limit).prefetch(wanted)

    def close(self) -> None:
        """End the threads that read ahead, and let go of files; it may be read from again."""
        self._reader.close()

    def keeping(self) -> AbstractContextManager[Any]:
        """Around the reading of a batch: what is made in it may be cached, if `settle` says so."""
        return nullcontext() if self.decoded is None else self.decoded.keeping()

    def settle(self, drew: bool) -> None:
        """Cache what was made, unless random numbers were drawn for it."""
        if self.decoded is not None:
            self.decoded.settle(drew)

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Meanwhile nothing is taken from the cache, which may be of an earlier `decode`."""
        cache, self.decoded = self.decoded, None
        try:
            yield
        finally:
            self.decoded = cache

    def block_bytes(self, block: int) -> int:
        """What a block takes in memory."""
        return self.index.block_bytes(block)

    # --- what is wrong, in words

    @property
    def in_words(self) -> str:
        """Of what it is made: "in 4 parquet files"."""
        columns = self.fingerprint.partition(" ")[2]
        files = f"in {len(self.index.shards):,} {self.index.kind} files"
        return files if columns == "*" else f"{files}, columns {columns}"

    def name_of(self, index: int) -> str:
        """A sample by its file."""
        number = self.blocks_of([index])[0]
        block = self.index.block(number)
        return f"{index} (record {block.row + index - int(self.index.first[number])} of {block.file})"

    def _bad(self, block: int, error: ShardError) -> BadSample:
        place = shown_place(self.index.place)
        is_beside = self.index_path in (f"{place}/{NAME}", str(Path(place, NAME)))
        output = "" if is_beside else f" --output {quote(self.index_path)}"
        # A record of a block that is not damaged was listed as it is: nothing has become of it since.
        is_damaged = isinstance(error, DamagedBlock)
        what = "Restore the file, or list what it holds now"
        what = what if is_damaged else "Repair the record, list the files as they are then"
        hint = f"{what} (`quorate data index {quote(place)}{output} --force`) and train again; {SKIP}"
        others = int(self.blocks[block]) - 1 if is_damaged else 0
        records = "record" if others == 1 else "records"
        more = f"; and with it the {others:,} other {records} of this block" if others else ""
        return BadSample(error.message, hint=hint, more=more)

    @property
    def unreadable_hint(self) -> str:
        """What to do where its columns cannot be read."""
        return (
            "`quorate data verify PATH` says whether the files are as they were indexed; with decode= the records are "
            "read one by one."
        )

    @property
    def alike_hint(self) -> str:
        """What to do where samples cannot be collated."""
        if self.index.kind in COLUMNAR and not self.has_decode:
            return (
                "columns= of quorate.Shards chooses the columns that are read; decode= makes samples of the records "
                "that are alike and hold nothing but numbers, tensors and texts."
            )
        return f"Make all samples alike in decode= of quorate.Shards, {COLLATE}"

    # --- building

    def _blocks(self) -> ShardBlocks:
        indexed_at = None
        if not is_url(self.index_path):
            with suppress(OSError):
                indexed_at = Path(self.index_path).stat().st_mtime
        return ShardBlocks(self.index, indexed_at, self._columns, self._cache)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_reader", "decoded")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _index_path(place: str) -> str:
    """The file of the index that was read, or its URL."""
    if is_url(place):
        return place if place.endswith(Path(NAME).suffix) else f"{place}/{NAME}"
    return str(Path(place, NAME) if Path(place).is_dir() else place)


Array = numpy.ndarray[Any, Any]


def merged(parts: list[tuple[Indices, Array]], length: int) -> Any:
    """The rows of several blocks, each at its positions, as one tensor, or as a list of what has no shape."""
    first = parts[0][1]
    kind = _torchs(first.dtype)
    if kind is None or any(column.dtype != first.dtype for _, column in parts):
        values: list[Any] = [None] * length
        for positions, column in parts:
            for position, value in zip(positions.tolist(), rows(column), strict=True):
                values[position] = value
        return collate(values)
    # In memory of torch's own, which always begins at a round address: what is summed may depend on where it begins.
    whole = torch.empty((length, *first.shape[1:]), dtype=kind)
    array = whole.numpy()
    for positions, column in parts:
        array[positions if len(parts) > 1 else ...] = column
    return whole


def rows(column: Array) -> Any:
    """The values of a column one by one, as they can be collated: texts and records are values of Python."""
    return column.tolist() if column.dtype.kind in "SUV" else column


@cache
def _torchs(kind: "numpy.dtype[Any]") -> torch.dtype | None:
    """The type of torch that is the same; None if it has none."""
    try:
        return torch.from_numpy(numpy.empty(0, kind)).dtype
    except (TypeError, ValueError):
        return None


# --- what is the record's fault, and what the machine's

_KINDS = (
    MemoryError, torch.OutOfMemoryError, ImportError, TimeoutError, ConnectionError, urllib.error.URLError,
    subprocess.TimeoutExpired, concurrent.futures.BrokenExecutor, QuorateError,
)  # fmt: skip
# Libraries that ask other machines; not all of their errors are an OSError. Not all that is Google's: protobuf, which
# raises for a corrupt record, is too.
_OF_NETWORKS = re.compile(
    r"(aiobotocore|aiohttp|botocore|boto3|fsspec|gcsfs|google\.(api_core|auth|cloud|resumable_media)|azure|http|httpcore"
    r"|httpx|requests|s3fs|socket|ssl|urllib3)(\.|$)"
)
_TEXTS = re.compile(
    r"(can'?t|cannot|could not|failed to|unable to) (allocate|mmap|open shared memory|start (a )?new thread)"
    r"|(not enough|insufficient|out of) memory|too many open files|resource temporarily unavailable"
    r"|no space left on device|(cuda|cudnn|cublas|hip|nccl)\w* (driver )?error|encoder \w+ not available"
    r"|decoder \w+ not available",
    re.IGNORECASE,
)


def is_machine_error(error: BaseException | None) -> bool:
    """Whether it may be for the machine and not for the record, or what it was raised from is.

    Such a one ends the job, whatever it does with bad samples: left out on one crowded host, a sample would be missing
    that all others read.
    """
    while error is not None:
        if isinstance(error, _KINDS) or (isinstance(error, OSError) and error.errno is not None):
            return True
        if any(_OF_NETWORKS.match(kind.__module__) for kind in type(error).__mro__):
            return True
        # Those of torch, of OpenCV and of PIL say it in words only.
        says = isinstance(error, RuntimeError | OSError | SystemError) or type(error).__module__ == "cv2"
        if says and _TEXTS.search(str(error)):
            return True
        error = error.__cause__
    return False


# --- its arguments: looked for where they may lie, and refused in a sentence if they cannot be meant


def _placed(path: str | os.PathLike[str], *, is_made: bool = False) -> str:
    """Absolute: beside the file whose code gives a relative path or, if there is nothing, in the working folder.

    One that is nowhere is refused unless it `is_made` by whoever asks.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise TaskError(f"The folder of shards or of a cache is a path or a text, not {given(path)}.")
    if is_url(name):
        return name.rstrip("/")
    expanded = Path(name).expanduser()
    if expanded.is_absolute():
        return str(expanded)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    beside = (Path(frame.f_code.co_filename).parent / expanded).absolute()
    working = expanded.absolute()
    found = beside if beside.exists() else working
    # An index that is missing in a folder is told by whoever reads it, with the command that makes it.
    folder = found.parent if found.suffix == Path(NAME).suffix else found
    if not is_made and not folder.exists():
        also = "" if beside == working else f"{beside} (next to the task's file) and "
        raise RequestError(f"{name}: there is no such folder: looked for {also}{working} (in the working folder).")
    return str(found)


def _checked_decode(decode: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if decode is not None and not callable(decode):
        raise TaskError(f"decode= takes a function from a record to a sample, not {given(decode)}.")
    return decode


def _checked_columns(columns: Sequence[str] | None, index: ShardIndex) -> list[str] | None:
    if columns is None:
        return None
    if index.kind not in COLUMNAR:
        raise TaskError(f"columns= chooses columns of Parquet and HDF5; these shards are {index.kind}.")
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise TaskError(f"columns= takes a list of names such as ['image', 'label'], not {given(columns)}.")
    unknown = [name for name in columns if name not in index.schema]
    if unknown:
        raise TaskError(f"The shards have no column {unknown[0]!r}; they have {', '.join(index.schema)}.")
    repeated = next((name for name, times in Counter(columns).items() if times > 1), None)
    if repeated is not None:
        raise TaskError(f"columns= names {repeated!r} more than once. Name each column once.")
    return list(columns)


def _checked_window(window: int | None, index: ShardIndex) -> int:
    if window is None:
        size = int(index.sizes.sum())
        return max(1, min(MOST_SAMPLES, len(index) * MOST_BYTES // max(1, size)))
    if type(window) is not int or window < 1:
        raise TaskError(f"window= takes a whole number of samples of at least 1, not {given(window)}.")
    return window


def _checked_cache_key(key: str | None, needed: bool) -> str | None:
    if key is None and needed:
        raise TaskError(
            'cache= keeps the samples that decode= makes, and needs cache_key= with it: a text such as "v1" that says '
            "what decode makes. Samples are used again under the same key only; give another one whenever decode, or "
            "anything that it depends on, has changed."
        )
    if key is not None and (not isinstance(key, str) or not key):
        raise TaskError(f'cache_key= takes a text that is not empty, such as "v1", not {given(key)}.')
    return key


def _checked_cache(cache: Mapping[str, Any] | None) -> DiskCache | None:
    if cache is None:
        return None
    takes = f'cache= takes {{"folder": PATH, "gb": how much it may hold, {_CACHE_GB} by default}}'
    if not isinstance(cache, Mapping):
        raise TaskError(f"{takes}, not {given(cache)}.")
    unknown = [key for key in cache if key not in ("folder", "gb")]
    if unknown:
        raise TaskError(f"{takes}, and no {unknown[0]!r}.")
    if "folder" not in cache:
        raise TaskError(f'{takes}; its "folder" is missing.')
    gb = cache.get("gb", _CACHE_GB)
    is_number = isinstance(gb, int | float) and not isinstance(gb, bool) and math.isfinite(gb)
    if not is_number or gb * _GB < 1:
        raise TaskError(f'The "gb" of cache= is a number above 0 of 1,000,000,000 bytes, such as 20, not {given(gb)}.')
    folder = _placed(cache["folder"], is_made=True)
    if is_url(folder):
        raise TaskError(f'The "folder" of cache= is on a local disk, such as "/scratch/cache", not {shown(folder)}.')
    try:
        return DiskCache(Path(folder), int(gb * _GB))
    except RequestError as error:
        raise RequestError(f"{error.message} Give cache= another folder, or leave it out.") from None
