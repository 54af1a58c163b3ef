"""Parquet files: a block is a row group, decoded from its bytes and the footer of the file.

Nested columns are given as they are: lists as arrays, structs as dicts. A list of fixed size is a row of an array.
"""

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy

from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.data.bad_sample import Unreachable
from quorate.shards.formats.format import BadRecord, Block, ByteFile, Content, Format, ShardFile

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

    def group(self, start: int) -> int:
        return next(number for number, (begin, end) in enumerate(self.groups) if begin == start < end)


class ParquetRecords:
    """The rows of a row group, decoded. Nothing that it gives can be changed to change the block."""

    def __init__(self, table: Any, block: Block) -> None:
        self._block = block
        self._columns = {name: _column(table.column(name)) for name in table.column_names}

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def __len__(self) -> int:
        return self._block.records

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: self._value(name, column, row) for name, column in self._columns.items()}

    def columns(self, rows: Sequence[int] | Array) -> dict[str, Array]:
        wanted = numpy.asarray(rows, dtype=numpy.int64)
        return {name: self._rows(name, wanted) for name in self._columns}

    def _rows(self, name: str, wanted: Array) -> Array:
        column = self._columns[name]
        if isinstance(column, _Numbers):
            if column.missing is not None and column.missing[wanted].any():
                row = int(wanted[int(numpy.argmax(column.missing[wanted]))])
                why = "has no value there, and its values are numbers: fill it in, or use decode="
                raise self._bad(name, row, why)
            return column.array.take(wanted, axis=0)  # rows one by one, which indexing looks at more closely
        if isinstance(column, _Texts):
            return column.array.take(wanted)
        values = [self._value(name, column, row) for row in wanted.tolist()]
        # Not array(): that would make one array of lists that are equally long.
        return numpy.fromiter(values, dtype=object, count=len(wanted))

    def _value(self, name: str, column: "_Column", row: int) -> Any:
        try:
            return column.record(row)
        except UnicodeDecodeError as error:
            raise self._bad(name, row, f"has the byte {error.object[error.start]:#04x}, which is not UTF-8") from None
        except (ValueError, OverflowError) as error:
            raise self._bad(name, row, f"has no value that can be read: {error}") from None

    def _bad(self, name: str, row: int, why: str) -> BadRecord:
        return BadRecord(self._block.file, f"row {self._block.row + row}", f"column {name} {why}")


@dataclass(frozen=True)
class _Numbers:
    """A column as an array. Rows that are `missing` lack a value, or a part of it; those are still in the `chunk`."""

    array: Array
    missing: Array | None
    chunk: Any

    @property
    def nbytes(self) -> int:
        kept = 0 if self.missing is None else self.missing.nbytes + self.chunk.get_total_buffer_size()
        return int(self.array.nbytes + kept)

    def record(self, row: int) -> Any:
        if self.missing is not None and self.missing[row]:
            return self.chunk[row].as_py()
        value = self.array[row]
        if self.array.ndim > 1:
            return value.copy()
        return value if self.array.dtype.kind in "mM" else value.item()


@dataclass(frozen=True)
class _Texts:
    """A column of texts, made once: nobody can change one, so they are handed out as they are."""

    array: Array
    nbytes: int

    def record(self, row: int) -> Any:
        return self.array[row]


@dataclass(frozen=True)
class _Objects:
    """A column that only Arrow has: each value is made when it is asked for; lists of numbers as arrays."""

    chunk: Any

    @property
    def nbytes(self) -> int:
        return int(self.chunk.get_total_buffer_size())

    def record(self, row: int) -> Any:
        value, kind = self.chunk[row], self.chunk.type
        if isinstance(value, (pa := _pyarrow()[0]).ListScalar | pa.LargeListScalar) and _is_number(kind.value_type):
            values = value.values
            if values is not None and not values.null_count:
                return values.to_numpy(zero_copy_only=False).copy()
        return value.as_py()


_Column = _Numbers | _Texts | _Objects


def _column(column: Any) -> _Column:
    pa, _ = _pyarrow()
    chunk = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    shape: tuple[int, ...] | None = None
    order: Sequence[int] | None = None
    if isinstance(chunk.type, pa.FixedShapeTensorType):
        shape, order, chunk = tuple(chunk.type.shape), chunk.type.permutation, chunk.storage
    if pa.types.is_dictionary(chunk.type) and (_is_number(chunk.type.value_type) or _is_text(chunk.type.value_type)):
        chunk = chunk.dictionary_decode()
    if _is_text(chunk.type):
        return _texts(chunk)
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
    if not _is_number(inner.type):
        return _Objects(chunk)
    array = _numbers(inner).reshape((sizes[0], *(shape or sizes[1:])))
    if order is not None:
        array = array.transpose(0, *(dimension + 1 for dimension in order))
    return _Numbers(array, missing, chunk) if missing.any() else _Numbers(array, None, None)


def _texts(chunk: Any) -> _Texts | _Objects:
    try:
        values = chunk.to_pylist()
    except UnicodeDecodeError:
        return _Objects(chunk)  # whoever reads the row learns of it
    array = numpy.array(values, dtype=object)
    return _Texts(array, array.nbytes + sum(map(sys.getsizeof, values)))


def _numbers(chunk: Any) -> Array:
    """Numbers as they are; where there is none, there is a zero."""
    if not chunk.null_count:
        return numpy.asarray(chunk.to_numpy(zero_copy_only=False))
    # Arrow itself would make floating-point numbers of integers, and only in blocks that lack a value.
    there = chunk.drop_null().to_numpy(zero_copy_only=False)
    array = numpy.zeros(len(chunk), there.dtype)
    array[chunk.is_valid().to_numpy(zero_copy_only=False)] = there
    return array


def _is_text(kind: Any) -> bool:
    types = _pyarrow()[0].types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_number(kind: Any) -> bool:
    types = _pyarrow()[0].types
    is_time = types.is_timestamp(kind) or types.is_date(kind) or types.is_duration(kind)
    return bool(is_time or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


class Parquet(Format):
    """Parquet files. The footers of the shards that were read last are kept."""

    kind = "parquet"
    endings = (".parquet",)
    alike = True

    def __init__(self) -> None:
        self._footers: OrderedDict[str, tuple[Footer, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def scan(self, file: ShardFile, fields: dict[str, str]) -> Iterator[tuple[Block, Content]]:
        footer = _read_footer(file)
        schema = footer.metadata.schema.to_arrow_schema()
        fields |= {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
        if len(fields) != len(schema.names):
            raise BadRecord(file.name, "byte 0", "two columns have the same name")
        row = 0
        for number, (start, end) in enumerate(footer.groups):
            rows = footer.metadata.row_group(number).num_rows
            if start == end:
                continue
            content = file.read(start, end - start)
            if len(content) != end - start:
                raise BadRecord(file.name, f"byte {start}", "the file ends in a row group: it was cut off")
            yield Block(file.name, start, end - start, rows, row), content
            row += rows

    def open(
        self,
        content: Content,
        block: Block,
        fields: Mapping[str, str],  # noqa: ARG002 (the footer says it)
        tail: Callable[[], bytes],
        columns: Sequence[str] | None = None,
    ) -> ParquetRecords:
        pa, parquet = _pyarrow()
        footer = self._footer(block.file, tail)
        try:
            source = pa.PythonFile(_piece(content, block.start), "r")
            opened = parquet.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
            chosen = None if columns is None else list(columns)
            table = opened.read_row_group(footer.group(block.start), columns=chosen, use_threads=False)
            if table.num_rows != block.records:
                raise ValueError(f"{table.num_rows} rows, and the index says {block.records}")
            return ParquetRecords(table if columns is None else table.select(chosen), block)
        except MemoryError:
            raise
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            _refuse_lacking(block.file, error)
            text = " ".join(str(error).split())[:200].rstrip(".")
            raise BadRecord(block.file, f"byte {block.start}", f"the row group cannot be decoded: {text}") from None

    def _footer(self, file: str, tail: Callable[[], bytes]) -> Footer:
        with self._lock:
            if file in self._footers:
                self._footers.move_to_end(file)
                return self._footers[file][0]
        content = tail()
        footer = parse_footer(content, file, f"the last {len(content):,} bytes")
        with self._lock:
            if file not in self._footers:
                self._footers[file] = footer, len(content)
                self._bytes += len(content)
            while self._bytes > FOOTERS and len(self._footers) > 1:
                _, (_, size) = self._footers.popitem(last=False)
                self._bytes -= size
        return footer


def _read_footer(file: ShardFile) -> Footer:
    end = file.read(max(0, file.size - _END), _END)
    if end[4:] != MAGIC:
        why = "it is not a parquet file" if file.read(0, 4) != MAGIC else "its footer is missing: it was cut off"
        raise BadRecord(file.name, f"byte {max(0, file.size - _END)}", why)
    start = file.size - _END - int.from_bytes(end[:4], "little")
    if start < len(MAGIC):
        raise BadRecord(file.name, f"byte {file.size - _END}", "its footer is longer than the file")
    return parse_footer(file.read(start, file.size - start), file.name, f"byte {start}")


def parse_footer(content: bytes, file: str, place: str) -> Footer:
    """The footer at the end of some bytes, which lie at that place in the file."""
    pa, parquet = _pyarrow()
    try:
        metadata = parquet.read_metadata(pa.BufferReader(content))
        groups = tuple(_groups(metadata))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:200].rstrip(".")
        raise BadRecord(file, place, f"its footer cannot be read: {text}") from None
    return Footer(metadata, groups)


def _refuse_lacking(file: str, error: Exception) -> None:
    """Say so if pyarrow cannot decode it here: with another one it might. Of a codec that it lacks it says so only."""
    pa, _ = _pyarrow()
    if not isinstance(error, pa.ArrowNotImplementedError) and not re.search("not (supported|built)", str(error)):
        return
    why = str(error).rstrip(".")
    raise Unreachable(
        f"{file} cannot be decoded with pyarrow {pa.__version__} of this machine: {why}. Install the same pyarrow "
        "on every machine, one that can read it, or write the shards in another way, such as with zstd."
    ) from None


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
            raise ValueError("row groups that are not contiguous")
        yield before, end
        before = end


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise RequestError(f"Parquet files need the package pyarrow: {install_of('parquet')}.") from None
    return pa, parquet


def _piece(content: Content, start: int) -> ByteFile:
    """A row group that begins there, as a file of which no more than that is read."""
    whole = memoryview(content)

    def read(position: int, length: int) -> memoryview:
        if position < start:
            raise ValueError(f"byte {position} is before the row group")
        return whole[position - start : position - start + length]

    return ByteFile(start + len(whole), read)
