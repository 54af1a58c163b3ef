"""HDF5 files: a record is a row of all the datasets of a file, which have equal first dimensions.

A block is a range of rows. Its bytes are those of the rows as numbers, dataset by dataset in the order of their names,
little-endian: they do not depend on how the file is laid out or compressed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.data.bad_sample import Unreachable
from quorate.shards.formats.format import BLOCK, BadRecord, Block, ByteFile, Content, Format, ShardFile

_PLAIN = "biufcS"
_MOST = 1_000_000_000
_BLOCKS_AT_MOST = 4
"""A block is so many times larger than others at most, so that no chunk is decompressed for two of them."""
_KNOWN_FILTERS = (4, *range(256, 512), *range(32_000, 32_768))
"""Those that HDF5 may have or lack: szip, and what others have registered. Any other number is damage."""

Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Column:
    """A dataset: its type and the shape of a row."""

    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    def __str__(self) -> str:
        text = str(self.dtype.newbyteorder("=")).removeprefix("|")
        return f"{text} {list(self.shape)}" if self.shape else text

    @classmethod
    def parse(cls, text: str) -> "Column":
        dtype, _, shape = text.partition(" ")
        sizes = [int(each) for each in shape.strip("[]").split(",") if each.strip()]
        return cls(numpy.dtype(dtype).newbyteorder("<"), tuple(sizes))


def rows_in_block(row_bytes: int, chunk: int) -> int:
    """How many rows: whole chunks of so many, or equal parts of one that would take too much memory."""
    usual = max(1, BLOCK // max(1, row_bytes))
    most = max(1, _BLOCKS_AT_MOST * BLOCK // max(1, row_bytes))
    if chunk <= most:
        return min(-(-usual // chunk), most // chunk) * chunk
    return -(-chunk // -(-chunk // most))


class Hdf5Records:
    """Rows as arrays."""

    def __init__(
        self, content: Content, block: Block, fields: Mapping[str, str], columns: Sequence[str] | None
    ) -> None:
        parsed = {name: Column.parse(text) for name, text in sorted(fields.items())}
        expected = block.records * sum(column.nbytes for column in parsed.values())
        if expected != len(content):
            why = f"the rows have {len(content):,} bytes, and by the index they have {expected:,}"
            raise BadRecord(block.file, f"row {block.start}", why)
        self._records = block.records
        self._columns: dict[str, Array] = {}
        position = 0
        for name, column in parsed.items():
            size = column.nbytes * block.records
            if columns is None or name in columns:
                rows = numpy.frombuffer(memoryview(content)[position : position + size], column.dtype)
                # Some columns are copied, so that nothing is kept of the others.
                rows = rows if columns is None else rows.copy()
                self._columns[name] = rows.reshape((block.records, *column.shape))
            position += size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._columns.values())

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, row: int) -> dict[str, Any]:
        # Copies: they may be changed in place, and the block is read again.
        return {
            name: array[row].copy() if array.ndim > 1 else array[row].item() for name, array in self._columns.items()
        }

    def columns(self, rows: Sequence[int] | Array) -> dict[str, Array]:
        wanted = numpy.asarray(rows, dtype=numpy.int64)
        return {name: array[wanted] for name, array in self._columns.items()}


class Hdf5(Format):
    """HDF5 files."""

    kind = "hdf5"
    endings = (".h5", ".hdf5")
    unit = "row"
    alike = True

    def scan(self, file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
        """Ranges of rows, of about as many bytes as other blocks, and of whole chunks where those are not too large."""
        with _opened(file, "byte 0") as (datasets, columns):
            rows = {each: int(dataset.shape[0]) for each, dataset in datasets.items()}
            if not rows:
                raise BadRecord(file.name, "byte 0", "there is no dataset with rows in it")
            (first, total), *others = rows.items()
            for each, count in others:
                if count != total:
                    why = f"the dataset {each} has {count:,} rows, and {first} has {total:,}: a record is a row of all"
                    raise BadRecord(file.name, f"row {min(count, total)}", why)
            fields |= {each: str(column) for each, column in columns.items()}
            largest = max(columns, key=lambda each: columns[each].nbytes)
            chunks = datasets[largest].chunks
            step = rows_in_block(sum(column.nbytes for column in columns.values()), chunks[0] if chunks else 1)
            for start in range(0, total, step):
                count = min(step, total - start)
                yield Block(file.name, start, count, count, start), _content(datasets, columns, start, count)

    def read(self, file: ShardFile, block: Block) -> bytes:
        # What is no HDF5 file any more has no rows, and no rows have another digest.
        with contextlib.suppress(BadRecord), _opened(file, f"row {block.start}") as (datasets, columns):
            # A damaged file may claim rows of any size, and they must not be asked for.
            size = block.length * sum(column.nbytes for column in columns.values())
            is_short = any(dataset.shape[0] < block.start + block.length for dataset in datasets.values())
            if not is_short and size <= max(_MOST, 1000 * file.size):
                return _content(datasets, columns, block.start, block.length)
        return b""

    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],
        tail: Callable[[], bytes],  # noqa: ARG002 (rows say all)
        columns: Sequence[str] | None = None,
    ) -> Hdf5Records:
        return Hdf5Records(content, block, fields, columns)


@contextlib.contextmanager
def _opened(file: ShardFile, place: str) -> Iterator[tuple[dict[str, Any], dict[str, Column]]]:
    """All datasets of a file that have rows, by name, and what they are."""
    try:
        import h5py
    except ImportError:
        raise RequestError(f"HDF5 files need the package h5py: {install_of('hdf5')}.") from None
    found: dict[str, Any] = {}

    def note(name: str, each: Any) -> None:
        if isinstance(each, h5py.Dataset) and each.shape:
            found[name] = each

    bytes_of_file = ByteFile(file.size, file.read)
    try:
        with h5py.File(bytes_of_file, "r") as opened:
            opened.visititems(note)
            datasets = dict(sorted(found.items()))
            columns = {each: _column(file.name, each, dataset) for each, dataset in datasets.items()}
            try:
                yield datasets, columns
            except OSError:
                _refuse_lacking(file.name, found)
                raise
    except MemoryError:
        # It may be the machine's, where another could read the same rows.
        raise
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        if bytes_of_file.error is not None:
            # Of the disk or the store, and not of the data.
            raise bytes_of_file.error from None
        text = " ".join(str(error).split())[:200].rstrip(".")
        raise BadRecord(file.name, place, f"it cannot be read as HDF5: {text or type(error).__name__}") from None


def _refuse_lacking(file: str, datasets: dict[str, Any]) -> None:
    """Say so if rows are compressed in a way that HDF5 does not know here: another machine may read them."""
    from h5py import h5z

    for each, dataset in datasets.items():
        made = dataset.id.get_create_plist()
        for code, _, _, name in map(made.get_filter, range(made.get_nfilters())):
            if code in _KNOWN_FILTERS and not h5z.filter_avail(code):
                raise Unreachable(
                    f"{file} cannot be read here: its dataset {each} is compressed with the filter "
                    f"{name.decode(errors='replace') or 'of number'} ({code}), which HDF5 does not have on this "
                    "machine. Install it on every machine and set HDF5_PLUGIN_PATH (the package hdf5plugin has the "
                    "usual ones), or write the file with gzip."
                ) from None


def _column(file: str, name: str, dataset: Any) -> Column:
    if dataset.dtype.kind not in _PLAIN:
        why = f"the dataset {name} is of {dataset.dtype}, which has no fixed size: write it as numbers or as S texts"
        raise BadRecord(file, "row 0", why)
    return Column(dataset.dtype.newbyteorder("<"), tuple(int(size) for size in dataset.shape[1:]))


def _content(datasets: dict[str, Any], columns: dict[str, Column], start: int, count: int) -> bytes:
    rows = {name: dataset[start : start + count] for name, dataset in datasets.items()}
    return b"".join(numpy.ascontiguousarray(each, dtype=columns[name].dtype).tobytes() for name, each in rows.items())
