"""The index beside a run's events: what reading them comes to, so that a long run is not read from its beginning.

`events.index` is a sequence of blocks, each for the lines of `events.jsonl` from one offset to another: the numbers of
their steps as columns, all other lines as they are, and the state of whoever has read everything up to there. A reader
takes the blocks and reads on behind them, and comes to the same as one that has read every line. Whoever has read much
more than the index knows appends a block. It can be removed at any time, and is made again.

::

    block    frame | head (JSON: begin, end, last, rows, columns, state) | lines | columns
    frame    8 bytes "QRINDEX2", lengths of head, lines and columns, xxh3-128 of head and lines, xxh3-128 of the columns

A block that was torn, or was written for other lines than stand in the file now, ends the index: `last` is the digest
of the last line that it was written for, and is compared with what stands there.
"""

import fcntl
import io
import json
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from quorate.core.errors import RunError
from quorate.core.regular_file import open_regular, opened_regular
from quorate.history.step_rows import PackedRows, StepRows
from quorate.history.timeline import EventFold, Timeline
from quorate.observe.event import Event
from quorate.observe.sinks import Queued
from quorate.storage.atomic import write_fully

log = logging.getLogger(__name__)

WORTH_WRITING = 4 * 2**20
"""Bytes of events: to read so many takes a few hundredths of a second, so an index for fewer would gain nothing."""
_MAGIC = b"QRINDEX2"
_FRAME = struct.Struct("<8sIIQ16s16s")
_LONGEST_COMPARED = 4096
# Of the launcher: more bytes than so many events usually have, so that it catches up.
_READ_AFTER = 1000
_READ_AT_ONCE = 2**20


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def index_of_events(events_file: Path) -> Path:
    """Where the index of a file of events is."""
    return events_file.with_suffix(".index")


def read_timeline(events_file: Path, as_rows: bool = False) -> Timeline:
    """All that a run has told. Of a long one, or with `as_rows`, the numbers of the steps are in `Timeline.rows`."""
    if not as_rows and not index_of_events(events_file).exists() and _size(events_file) < WORTH_WRITING:
        return Timeline.read(events_file)
    reader = IndexedReader(events_file)
    reader.read_on()
    if reader.is_worth_writing:
        reader.write()
    return reader.concluded()


def glance(events_file: Path) -> Timeline:
    """The same without steps, recoveries and waiting, for a list of runs (`Timeline.glance`)."""
    blocks = _Index.load(events_file, with_columns=False).blocks
    fold = EventFold()
    if blocks and _restore(fold, blocks):
        return fold.through(events_file, blocks[-1].end)
    return Timeline.glance(events_file)


@dataclass(frozen=True)
class _Block:
    """What the lines from one offset to another come to. `last` is the digest of the last of them, so many bytes."""

    begin: int
    end: int
    last: tuple[int, str]
    state: dict[str, Any]
    lines: bytes
    rows: PackedRows

    def encoded(self) -> bytes:
        head = {
            "begin": self.begin,
            "end": self.end,
            "last": self.last,
            "state": self.state,
            "rows": self.rows.count,
            "columns": self.rows.names,
        }
        described = json.dumps(head, separators=(",", ":")).encode()
        digests = xxhash.xxh3_128_digest(described + self.lines), xxhash.xxh3_128_digest(self.rows.content)
        lengths = len(described), len(self.lines), len(self.rows.content)
        return _FRAME.pack(_MAGIC, *lengths, *digests) + described + self.lines + self.rows.content


@dataclass
class _Index:
    """The blocks of an index that can be used, and the bytes that they take; `size` is all that was there."""

    blocks: list[_Block] = field(default_factory=list)
    used: int = 0
    size: int = 0

    @classmethod
    def load(cls, events_file: Path, with_columns: bool = True) -> "_Index":
        """As much of it as is whole, and fits the events that are there now."""
        index = cls()
        try:
            with opened_regular(index_of_events(events_file)) as file, opened_regular(events_file) as events:
                index.size = file.seek(0, os.SEEK_END)
                file.seek(0)
                for block in _blocks(file, with_columns):
                    if block.begin != (index.blocks[-1].end if index.blocks else 0) or not _fits(block, events):
                        break
                    index.blocks.append(block)
                    index.used = file.tell()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, FileNotFoundError):
                log.info("the index of %s is left aside: %r", events_file, error)
        return index


def _blocks(file: io.BufferedReader, with_columns: bool) -> Iterator[_Block]:
    """Those that are whole, up to the first that is not."""
    while len(frame := file.read(_FRAME.size)) == _FRAME.size:
        magic, *lengths, digest, columns_digest = _FRAME.unpack(frame)
        if magic != _MAGIC:
            return
        described, lines = file.read(lengths[0]), file.read(lengths[1])
        if xxhash.xxh3_128_digest(described + lines) != digest:
            return
        head, content = json.loads(described), b""
        if not with_columns:
            file.seek(lengths[2], os.SEEK_CUR)
        elif xxhash.xxh3_128_digest(content := file.read(lengths[2])) != columns_digest:
            return
        rows = PackedRows(head["rows"], tuple(head["columns"]), content)
        yield _Block(head["begin"], head["end"], tuple(head["last"]), head["state"], lines, rows)


def _fits(block: _Block, events: io.BufferedReader) -> bool:
    """Whether the line that a block ends with stands there."""
    length, digest = block.last
    events.seek(block.end - length)
    return _digest(events.read(length)) == digest


def _digest(line: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(line)


def _restore(fold: EventFold, blocks: list[_Block], with_lines: bool = True) -> bool:
    """Have a fold know all that the blocks tell; whether they can be read by this version."""
    lines = (line for block in blocks for line in block.lines.split(b"\n") if line)
    try:
        fold.restore(blocks[-1].state, lines if with_lines else ())
    except (ValueError, KeyError, TypeError) as error:
        log.info("an index is left aside: %r", error)
        return False
    return True


class IndexedReader:
    """Reads a run's events from where its index ends, again and again if that is wanted, and can extend the index.

    One that is `for_writing` only keeps no more than it needs for the next block.
    """

    def __init__(self, events_file: Path, for_writing: bool = False) -> None:
        self._events_file = events_file
        self._for_writing = for_writing
        self._begin()

    def _begin(self) -> None:
        index = _Index.load(self._events_file, with_columns=not self._for_writing)
        self._rows = StepRows([] if self._for_writing else [block.rows for block in index.blocks])
        self._fold = EventFold(rows=self._rows)
        blocks = index.blocks
        if blocks and not _restore(self._fold, blocks, with_lines=not self._for_writing):
            blocks, index.used = [], 0
            self._rows = StepRows()
            self._fold = EventFold(rows=self._rows)
        self._used, self._size = index.used, index.size
        self.offset = self._cut_at = self._written_to = blocks[-1].end if blocks else 0
        self._blocks: list[_Block] = []  # that are still to be written
        self._lines: list[bytes] = []
        self._last_line = self._rest = b""

    @property
    def is_worth_writing(self) -> bool:
        """Whether much was read that is not in the index."""
        return self.offset - self._written_to >= WORTH_WRITING

    @property
    def has_index(self) -> bool:
        return self._written_to > 0

    def read_on(self, limit: int | None = None) -> None:
        """Take in what is new in the file, so many bytes at most. A file that is another now is read from its start."""
        try:
            with opened_regular(self._events_file) as file:
                if not self._is_at_its_place(file):
                    self._begin()
                begin = self.offset
                file.seek(begin)
                self._rest = b""
                for line in file:
                    if not line.endswith(b"\n"):
                        self._rest = line
                        break
                    self._take(line)
                    if limit is not None and self.offset - begin >= limit:
                        break
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"cannot read {self._events_file}: {error.strerror or error}") from error

    def timeline(self) -> Timeline:
        """What whole lines have told so far."""
        return self._fold.timeline()

    def concluded(self) -> Timeline:
        """What all of the file tells, half a line included, as a crash leaves it. Nothing can be read on then."""
        if self._rest:
            self._fold.take(self._rest)
        return self._fold.timeline()

    def write(self) -> bool:
        """Append what was read to the index; whether that was done. Where it cannot be written it is not, nor where
        another process is about to write, or has written."""
        self._cut()
        try:
            descriptor = open_regular(index_of_events(self._events_file), os.O_RDWR | os.O_CREAT)
            with io.FileIO(descriptor, "r+") as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_size != self._size:
                    return False
                file.truncate(self._used)
                file.seek(self._used)
                used = self._used + sum(write_fully(descriptor, block.encoded()) for block in self._blocks)
        except OSError as error:
            log.info("the index of %s is not written: %s", self._events_file, error)
            return False
        self._used = self._size = used
        self._written_to = self._cut_at
        self._blocks = []
        if self._for_writing:
            self._fold.forget()
            self._rows.packed.clear()
        return True

    def _is_at_its_place(self, file: io.BufferedReader) -> bool:
        """Whether what was read stands before the offset still: the file may be shorter now, or another."""
        if file.seek(0, os.SEEK_END) < self.offset:
            return False
        file.seek(self.offset - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _take(self, line: bytes) -> None:
        if self._fold.take(line):
            self._lines.append(line)
        self.offset += len(line)
        self._last_line = line[-_LONGEST_COMPARED:]
        if self.offset - self._cut_at >= WORTH_WRITING:
            self._cut()

    def _cut(self) -> None:
        """Make a block of what was read since the last."""
        if self.offset == self._cut_at:
            return
        last = len(self._last_line), _digest(self._last_line)
        block = _Block(self._cut_at, self.offset, last, self._fold.state(), b"".join(self._lines), self._rows.pack())
        self._blocks.append(block)
        self._cut_at, self._lines = self.offset, []


class IndexSink:
    """Extends the index of a run while it runs, in the launcher, in small pieces and in a thread of its own: whoever
    watches over the workers waits for nothing.

    A run whose events can be read in no time gets no index, and costs nothing.
    """

    def __init__(self, events_file: Path) -> None:
        self._events_file = events_file
        self._writer: Queued | None = None
        self._pending = 0

    def handle(self, event: Event) -> None:
        self._pending += 1
        if self._pending < _READ_AFTER:
            return
        self._pending = 0
        if self._writer is None and _size(self._events_file) >= WORTH_WRITING:
            self._writer = Queued(IndexWriter(self._events_file))
        if self._writer is not None:
            self._writer.handle(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class IndexWriter:
    """Reads a piece of the file with every event that it is given, whichever that is, and writes what is worth it."""

    def __init__(self, events_file: Path) -> None:
        self._events_file = events_file
        self._reader: IndexedReader | None = None

    def handle(self, event: Event | None = None) -> None:  # noqa: ARG002 (the file has it, with its place)
        if self._reader is None:
            self._reader = IndexedReader(self._events_file, for_writing=True)
        self._reader.read_on(_READ_AT_ONCE)
        if self._reader.is_worth_writing and not self._reader.write():
            self._reader = None  # somebody else has written: begin with that

    def close(self) -> None:
        """Write what is left of a long run; what would take too long now, the next reader adds."""
        self.handle()
        if self._reader is not None and self._reader.has_index:
            self._reader.write()
