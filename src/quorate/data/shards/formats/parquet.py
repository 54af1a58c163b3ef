"""Parquet files: a block is a row group, decoded from its bytes and the footer of the file.

Nested columns are given as they are: lists as arrays, structs as dicts. A list of fixed size is a row of an array.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy

from quorate.core.errors import RequestError
from quorate.data.shards.errors import BadRecord
from quorate.data.shards.formats.format import Block, Content, Scanned, ShardFile, refuse_unknown

MAGIC = b"PAR1"
FOOTERS = 64_000_000
"""So many bytes of footers are kept; they take about as much again when they are parsed."""
_END = 8

Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Footer:
    """What the end of a file says of its row groups: where each begins and ends, and its number."""

    metadata: Any
    groups: tuple[tuple[int, int], ...]

    @property
    def tail(self) -> int:
        """Where the last row group ends."""
        return max((end for _, end in self.groups), default=0)

    def group(self, start: int) -> int:
        """The number of the row group whose block begins there."""
        return next(number for number, (begin, end) in enumerate(self.groups) if begin == start < end)


@dataclass
class ParquetScan:
    """One parquet file while it is indexed."""

    file: ShardFile
    fields: dict[str, str] = field(default_factory=dict)

    def blocks(self) -> Iterator[Scanned]:
        """One for each row group that has rows."""
        footer = self._footer()
        schema = footer.metadata.schema.to_arrow_schema()
        self.fields |= {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
        if len(self.fields) != len(schema.names):
            raise BadRecord(self.file.name, "byte 0", "two columns have the same name")
        row = 0
        for number, (start, end) in enumerate(footer.groups):
            rows = footer.metadata.row_group(number).num_rows
            if start == end:
                continue
            content = self.file.read(start, end - start)
            if len(content) != end - start:
                raise BadRecord(self.file.name, f"byte {start}", "the file ends in a row group: it was cut off")
            yield Scanned(Block(self.file.name, start, end - start, rows, row), content)
            row += rows

    def _footer(self) -> Footer:
        file = self.file
        end = file.read(max(0, file.size - _END), _END)
        if end[4:] != MAGIC:
            why = "it is no parquet file" if file.read(0, 4) != MAGIC else "its footer is missing: it was cut off"
            raise BadRecord(file.name, f"byte {max(0, file.size - _END)}", why)
        start = file.size - _END - int.from_bytes(end[:4], "little")
        if start < len(MAGIC):
            raise BadRecord(file.name, f"byte {file.size - _END}", "its footer is longer than the file")
        return parse_footer(file.read(start, file.size - start), file.name, start)


class ParquetRecords:
    """The rows of a row group, decoded."""

    def __init__(self, table: Any, block: Block) -> None:
        self._table = table
        self._block = block
        self._arrays: dict[str, _Values] = {}

    @property
    def nbytes(self) -> int:
        """What they take of the memory."""
        return int(self._table.nbytes)

    def __len__(self) -> int:
        return self._block.records

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: self._values(name).record(row) for name in self._table.column_names}

    def columns(self, rows: Sequence[int] | Array) -> dict[str, Array]:
        """Some rows, by column."""
        wanted = numpy.asarray(rows, dtype=numpy.int64)
        return {name: self._column(name, wanted) for name in self._table.column_names}

    def _column(self, name: str, wanted: Array) -> Array:
        values = self._values(name)
        if values.missing is not None and values.missing[wanted].any():
            row = self._block.row + int(wanted[int(numpy.argmax(values.missing[wanted]))])
            why = f"column {name} has no value there, and its values are numbers: fill it in, or use decode="
            raise BadRecord(self._block.file, f"row {row}", why)
        return values.array[wanted]

    def _values(self, name: str) -> "_Values":
        if name not in self._arrays:
            self._arrays[name] = _Values(self._table.column(name))
        return self._arrays[name]


class _Values:
    """A column as an array, and which rows have no value where the array cannot say so."""

    def __init__(self, column: Any) -> None:
        pa, _ = _pyarrow()
        chunk = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        shape: tuple[int, ...] | None = None
        if isinstance(chunk.type, pa.FixedShapeTensorType):
            shape, chunk = tuple(chunk.type.shape), chunk.storage
        if pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        self._chunk = chunk
        self.missing: Array | None = None
        sizes, inner = [len(chunk)], chunk
        missing = numpy.zeros(len(chunk), bool)
        while True:
            if inner.null_count:
                nulls = inner.is_null().to_numpy(zero_copy_only=False)
                missing |= nulls.reshape((sizes[0], prod(sizes[1:]))).any(axis=1)
            if not pa.types.is_fixed_size_list(inner.type):
                break
            size = inner.type.list_size
            sizes.append(size)
            inner = inner.values.slice(inner.offset * size, len(inner) * size)
        if _is_number(inner.type):
            self.array = _numbers(inner).reshape((sizes[0], *(shape or sizes[1:])))
            self.missing = missing if missing.any() else None
        else:
            self.array = _objects(chunk)

    def record(self, row: int) -> Any:
        if self.missing is not None and self.missing[row]:
            return self._chunk[row].as_py()
        value = self.array[row]
        if self.array.ndim > 1:
            # A copy: it may be changed in place, and the block is read again.
            return value.copy()
        return value if self.array.dtype.kind in "OmM" else value.item()


def _numbers(chunk: Any) -> Array:
    """Numbers as they are; where there is none, there is a zero."""
    if not chunk.null_count:
        return numpy.asarray(chunk.to_numpy(zero_copy_only=False))
    # Arrow itself would make floating-point numbers of integers, and only in blocks that lack a value.
    there = chunk.drop_null().to_numpy(zero_copy_only=False)
    array = numpy.zeros(len(chunk), there.dtype)
    array[chunk.is_valid().to_numpy(zero_copy_only=False)] = there
    return array


def _objects(chunk: Any) -> Array:
    """Values one by one: a list of numbers as an array, and all else as Python has it."""
    pa, _ = _pyarrow()
    kind = chunk.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    array = numpy.empty(len(chunk), dtype=object)
    if is_list and _is_number(kind.value_type):
        for row, value in enumerate(chunk):
            plain = value.is_valid and not value.values.null_count
            array[row] = value.values.to_numpy(zero_copy_only=False).copy() if plain else value.as_py()
    else:
        array[:] = chunk.to_pylist()
    return array


def _is_number(kind: Any) -> bool:
    types = _pyarrow()[0].types
    is_time = types.is_timestamp(kind) or types.is_date(kind) or types.is_duration(kind)
    return bool(is_time or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


class Parquet:
    """Parquet files. The footers of the shards that were read last are kept."""

    kind = "parquet"
    unit = "byte"
    alike = True

    def __init__(self) -> None:
        self._footers: OrderedDict[str, tuple[Footer, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def scan(self, file: ShardFile) -> ParquetScan:
        """Find the row groups of a file."""
        return ParquetScan(file)

    def read(self, file: ShardFile, block: Block) -> bytes:
        """The bytes of a row group."""
        return file.read(block.start, block.length)

    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],
        tail: Callable[[], bytes],
        columns: Sequence[str] | None = None,
    ) -> ParquetRecords:
        """Decode a row group, all columns or some."""
        refuse_unknown(columns, fields)
        pa, parquet = _pyarrow()
        footer = self._footer(block.file, tail)
        try:
            source = pa.PythonFile(_Piece(content, block.start), "r")
            opened = parquet.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
            chosen = None if columns is None else list(columns)
            table = opened.read_row_group(footer.group(block.start), columns=chosen, use_threads=False)
            if table.num_rows != block.records:
                raise ValueError(f"{table.num_rows} rows, and the index says {block.records}")
            return ParquetRecords(table if columns is None else table.select(chosen), block)
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            text = " ".join(str(error).split())[:200].rstrip(".")
            raise BadRecord(block.file, f"byte {block.start}", f"the row group cannot be decoded: {text}") from None

    def _footer(self, file: str, tail: Callable[[], bytes]) -> Footer:
        with self._lock:
            if file in self._footers:
                self._footers.move_to_end(file)
                return self._footers[file][0]
        content = tail()
        footer = parse_footer(content, file, 0)
        with self._lock:
            if file not in self._footers:
                self._footers[file] = footer, len(content)
                self._bytes += len(content)
            while self._bytes > FOOTERS and len(self._footers) > 1:
                _, (_, size) = self._footers.popitem(last=False)
                self._bytes -= size
        return footer


def parse_footer(content: bytes, file: str, start: int) -> Footer:
    """The footer at the end of some bytes, which begin at `start` of the file."""
    pa, parquet = _pyarrow()
    try:
        metadata = parquet.read_metadata(pa.BufferReader(content))
        groups = tuple(_groups(metadata))
    except (pa.ArrowException, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:200].rstrip(".")
        raise BadRecord(file, f"byte {start}", f"its footer cannot be read: {text}") from None
    return Footer(metadata, groups)


def _groups(metadata: Any) -> Iterator[tuple[int, int]]:
    """Where each row group lies. What is between two of them belongs to the latter, so that every byte is checked."""
    before = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:
            yield before, before
            continue
        chunks = [group.column(column) for column in range(group.num_columns)]
        if not chunks:
            raise ValueError("a row group without columns")
        begins = [min(filter(None, (each.dictionary_page_offset, each.data_page_offset))) for each in chunks]
        ends = [begin + each.total_compressed_size for begin, each in zip(begins, chunks, strict=True)]
        start, end = min(begins), max(ends)
        if start < before or end <= start:
            raise ValueError("row groups that do not lie one behind the other")
        yield before, end
        before = end


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise RequestError("Parquet files need the package pyarrow: pip install 'quorate[parquet]'.") from None
    return pa, parquet


class _Piece:
    """A piece of a file, as a file of which no more than that is read."""

    def __init__(self, content: Content, start: int) -> None:
        self._content = memoryview(content)
        self._start = start
        self._position = 0
        self.closed = False

    def seek(self, offset: int, whence: int = 0) -> int:
        sizes = {0: 0, 1: self._position, 2: self._start + len(self._content)}
        self._position = sizes[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> memoryview:
        begin = self._position - self._start
        if begin < 0:
            raise ValueError(f"byte {self._position} is before the row group")
        end = len(self._content) if size < 0 else min(begin + size, len(self._content))
        self._position = self._start + end
        return self._content[begin:end]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
