"""Samples that `decode` has made, kept on the disk by block: another epoch or another job reads them from there.

They are written down exactly: trees of tensors, arrays, numbers and texts. Nothing of it can run code when it is read.
"""

import contextlib
import io
import logging
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from quorate.core.regular_file import open_regular
from quorate.data.indices import Indices
from quorate.shards.disk_cache import DiskCache

_MAGIC = b"QRTSMPL3"
_ROW = numpy.dtype([("start", "<u8"), ("length", "<u8"), ("digest", "<u8")])
# Instead of where a sample begins: it was not made yet, or its record is bad.
_MISSING, _BAD = 2**64 - 1, 2**64 - 2


class Spool:
    """A block's file while it is written."""

    def __init__(self, path: Path, records: int) -> None:
        self.path = path
        self.left = records
        self.bytes = 0
        self._table = numpy.zeros(records, _ROW)
        self._table["start"] = _MISSING
        # Opened for each write: there are many of them, and samples of one block come now and then.
        self.path.touch(exist_ok=False)

    def add(self, row: int, content: bytes | None) -> None:
        """A sample, or None for a bad one."""
        if self._table["start"][row] != _MISSING:
            return
        if content is None:
            self._table[row] = _BAD, 0, 0
        else:
            self._append(content)
            self._table[row] = self.bytes, len(content), xxhash.xxh3_64_intdigest(content)
            self.bytes += len(content)
        self.left -= 1

    def finish(self) -> None:
        table = self._table.tobytes()
        self._append(table + xxhash.xxh3_64_digest(table) + _MAGIC)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _append(self, content: bytes) -> None:
        # Never made anew: what was swept meanwhile has lost its beginning.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        with os.fdopen(descriptor, "ab") as file:
            file.write(content)


class SampleFile:
    """A block's file that is complete."""

    def __init__(self, path: Path, descriptor: int, table: Any) -> None:
        self.path = path
        self._descriptor = descriptor
        self._table = table

    @classmethod
    def at(cls, path: Path, records: int) -> "SampleFile | None":
        """The file, if it is there and its table is sound."""
        size = records * _ROW.itemsize
        try:
            descriptor = open_regular(path)
        except OSError:
            return None
        try:
            end = os.fstat(descriptor).st_size - size - 16
            tail = os.pread(descriptor, size + 16, end) if end >= 0 else b""
            table, digest, magic = tail[:size], tail[size : size + 8], tail[size + 8 :]
            if magic == _MAGIC and digest == xxhash.xxh3_64_digest(table):
                return cls(path, descriptor, numpy.frombuffer(table, _ROW))
        except OSError:
            pass
        os.close(descriptor)
        return None

    def is_bad(self, row: int) -> bool:
        return bool(self._table["start"][row] == _BAD)

    def read(self, row: int) -> bytes | None:
        """The bytes of a sample; None if they are damaged."""
        start, length, digest = self._table[row].item()
        try:
            content = os.pread(self._descriptor, length, start)
        except OSError:
            return None
        return content if xxhash.xxh3_64_intdigest(content) == digest else None

    def close(self) -> None:
        os.close(self._descriptor)


class NotEncodable(Exception):  # noqa: N818
    """A sample holds something that cannot be written down exactly; its text says what."""


def encode(sample: Any) -> bytes:
    """A pickle of nothing but containers, plain values, arrays and tensors."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(sample)
    return file.getvalue()


def decode(content: bytes) -> Any:
    """What `encode` was given, in memory of its own."""
    return _Unpickler(io.BytesIO(content)).load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, given: Any) -> Any:
        kind = type(given)
        if kind is torch.Tensor:
            return _tensor, _apart(given)
        if kind is numpy.ndarray or (isinstance(given, numpy.generic) and kind.__module__ == "numpy"):
            _check_array(given)
        elif not isinstance(given, numpy.dtype) and _name_of(given) not in _BUILDERS:
            raise NotEncodable(f"a {kind.__name__}")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _BUILDERS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a sample")
        return super().find_class(module, name)


def _name_of(given: Any) -> tuple[Any, Any]:
    return getattr(given, "__module__", None), getattr(given, "__qualname__", None)


def _check_array(value: Any) -> None:
    if value.dtype.hasobject or value.dtype.names is not None or not value.dtype.itemsize:
        raise NotEncodable(f"an array of {value.dtype}")
    if isinstance(value, numpy.generic) and value.dtype.kind in "SU" and value != numpy.array(value)[()]:
        raise NotEncodable("a text of NumPy that ends with a NUL")


def _apart(value: torch.Tensor) -> tuple[str, list[int], list[int], bytearray]:
    """Its type, and its dimensions from the outermost in memory: the layout is part of a tensor, and some kernels
    choose by it."""
    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
        raise NotEncodable("a tensor that is sparse, on a device, or has a gradient")
    order = _order(value.stride())
    dense = value.resolve_conj().resolve_neg().permute(order).contiguous()
    content = bytearray(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else bytearray()
    return str(value.dtype).removeprefix("torch."), list(dense.shape), order, content


def _order(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def _tensor(name: str, shape: list[int], order: list[int], content: bytearray) -> torch.Tensor:
    kind = getattr(torch, name)
    raw = torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)
    return raw.reshape(shape).permute(sorted(range(len(order)), key=order.__getitem__))


_BUILDERS = {_name_of(_tensor), ("numpy", "ndarray"), ("numpy", "dtype")} | {
    _name_of(builder)
    for example in (numpy.zeros(2), numpy.zeros(4)[::2], numpy.float32(0))
    for builder in (example.__reduce_ex__(5)[0],)
}
"""The functions and classes by which arrays and tensors are made: no others are called when a sample is read."""


log = logging.getLogger(__name__)

_OPEN, _SPOOLS = 128, 512
# What a process has unfinished takes at most so much of the cache.
_SHARE = 1 / 8
# Part of the name of all that is kept. Earlier versions of Quorate named samples by the code of decode().
_VERSION = "keyed-1"


class DecodedCache:
    """The samples of each block in one file, which is written as they are made and counts once all of them are in it.

    They are found by the data that they were made of and by `key`, with which the user says what `decode` makes of
    these. All of it is of one process: a forked child begins its own files.
    """

    def __init__(self, cache: DiskCache, data: str, key: str, records: Indices) -> None:
        self._cache = cache
        # Tensors are kept as this machine has them in memory.
        self._name = xxhash.xxh3_128_hexdigest(f"{_VERSION} {sys.byteorder} {data} {key}".encode())
        self._records = records
        self._is_on = True
        self._begin(os.getpid())

    def _begin(self, process: int) -> None:
        self._process = process
        # Of the batch that is being read; None between two of them.
        self._staged: list[tuple[int, int, bytes | None]] | None = None
        self._spools: OrderedDict[int, Spool] = OrderedDict()
        self._spooled = 0
        # Blocks that were given up, and how many of their rows are still to come: a file begun now would lack the rest.
        self._passing: dict[int, int] = {}
        self._open: OrderedDict[int, SampleFile | None] = OrderedDict()

    def _here(self) -> None:
        if self._process != os.getpid():
            self._begin(os.getpid())

    def _key(self, block: int) -> str:
        return f"{self._name}/samples-{block}"

    # --- reading

    def has(self, block: int) -> bool:
        return self._entry(block) is not None

    def get(self, block: int, row: int) -> tuple[bool, Any]:
        """Whether a sample is there, and the sample. A bad one is not: who decodes it again learns what is wrong."""
        entry = self._entry(block)
        if entry is None or entry.is_bad(row):
            return False, None
        content = entry.read(row)
        if content is None:
            log.warning("a file of the cache is damaged, and is made again: %s", entry.path)
            self._forget(block)
            return False, None
        return True, decode(content)

    def _entry(self, block: int) -> SampleFile | None:
        self._here()
        if block not in self._open:
            self._open[block] = SampleFile.at(self._cache.path(self._key(block)), int(self._records[block]))
            if (found := self._open[block]) is not None:
                self._cache.touch(found.path)
            while len(self._open) > _OPEN:
                _, oldest = self._open.popitem(last=False)
                if oldest is not None:
                    oldest.close()
        else:
            self._open.move_to_end(block)
        return self._open[block]

    def _forget(self, block: int) -> None:
        """Remove the file of a block, and look for no other before one was begun."""
        self._cache.remove(self._key(block))
        entry = self._open.get(block)
        if entry is not None:
            entry.close()
        self._open[block] = None

    # --- writing

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around the reading of a batch: what is made in it may be kept. What is not settled by its end, as it was left
        by an exception, is not."""
        self._here()
        self._staged = []
        try:
            yield
        finally:
            self._staged = None

    def stage(self, block: int, row: int, sample: Any, is_bad: bool = False) -> None:
        """A sample that was made, or a record that none can be made of; it is kept when it is known that no random
        numbers were drawn for it."""
        if self._staged is None or not self._is_on:
            return
        try:
            self._staged.append((block, row, None if is_bad else encode(sample)))
        except NotEncodable as reason:
            self._end(f"they hold {reason}")

    def settle(self, drew: bool) -> None:
        """Keep what was staged, unless random numbers were drawn."""
        self._here()
        staged, self._staged = self._staged or [], None
        if not self._is_on:
            return
        if drew:
            self._end("decode() draws random numbers, so they differ in every epoch")
            return
        try:
            for block, row, content in staged:
                self._keep(block, row, content)
        except OSError as error:
            self._cache.fail(error)
        if self._cache.has_failed:
            self._end("the disk does not take them")

    def _keep(self, block: int, row: int, content: bytes | None) -> None:
        entry = self._entry(block)
        if entry is not None:
            if content is None or not entry.is_bad(row):
                return
            # What was bad is so no longer: a file without that mark has to be made.
            self._forget(block)
        spool = self._spools.get(block) or self._begun(block)
        if spool is None:
            return
        self._spools.move_to_end(block)
        try:
            before = spool.bytes
            spool.add(row, content)
            self._spooled += spool.bytes - before
            self._cache.wrote(spool.bytes - before)
            if not spool.left:
                spool.finish()
                del self._spools[block]
                self._spooled -= spool.bytes
                self._cache.place(spool.path, self._key(block))
                self._open.pop(block, None)
        except FileNotFoundError:  # swept, to make room
            self._give_up(block)
        while self._spools and (len(self._spools) > _SPOOLS or self._spooled > self._cache.limit * _SHARE):
            self._give_up(next(iter(self._spools)))

    def _begun(self, block: int) -> Spool | None:
        if block in self._passing:
            self._passing[block] -= 1
            if self._passing[block] <= 0:
                del self._passing[block]
            return None
        # Another process may have made it since this one looked.
        self._open.pop(block, None)
        if self._entry(block) is not None:
            return None
        spool = self._spools[block] = Spool(self._cache.temporary(self._key(block)), int(self._records[block]))
        return spool

    def _give_up(self, block: int) -> None:
        spool = self._spools.pop(block)
        self._spooled -= spool.bytes
        if spool.left:
            self._passing[block] = spool.left
        spool.abandon()

    def _end(self, why: str) -> None:
        self._cache.note(f"decoded samples are no longer cached: {why}")
        self._is_on = False
        self._staged = None
        self._drop_spools()

    def _drop_spools(self) -> None:
        for spool in self._spools.values():
            spool.abandon()
        self._spools.clear()
        self._spooled = 0

    def close(self) -> None:
        """Let go of files; what is not complete is lost."""
        self._drop_spools()
        self._passing.clear()
        for entry in self._open.values():
            if entry is not None:
                entry.close()
        self._open.clear()
