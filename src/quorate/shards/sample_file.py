"""Decoded samples as bytes, and the file that holds those of a block.

They are written down exactly: trees of tensors, arrays, numbers and texts. Nothing of it can run code when it is read.
"""

import contextlib
import json
import os
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from quorate.core.regular_file import open_regular

_HEAD = struct.Struct("<I")
_ALIGN = 16
_MAGIC = b"QRTSMPL2"
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
    """A skeleton in JSON, and behind it the bytes of tensors, arrays and byte strings."""
    parts: list[bytes] = []
    skeleton = json.dumps(_skeleton(sample, parts), separators=(",", ":"), allow_nan=True).encode()
    head = _HEAD.pack(len(skeleton)) + skeleton
    pieces = [head, bytes(-len(head) % _ALIGN)]
    for part in parts:
        pieces += [part, bytes(-len(part) % _ALIGN)]
    return b"".join(pieces)


def decode(content: bytes) -> Any:
    """What `encode` was given, in memory of its own."""
    (size,) = _HEAD.unpack_from(content)
    begin = _HEAD.size + size
    position = begin + -begin % _ALIGN

    def take(size: int) -> memoryview:
        nonlocal position
        part = memoryview(content)[position : position + size]
        position += size + -size % _ALIGN
        return part

    return _restored(json.loads(content[_HEAD.size : begin]), take)


def _skeleton(value: Any, parts: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return {"t" if kind is tuple else "l": [_skeleton(item, parts) for item in value]}
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise NotEncodable("a dict whose keys are not texts")
        return {"d": [[key, _skeleton(item, parts)] for key, item in value.items()]}
    if kind is bytes:
        parts.append(value)
        return {"b": len(value)}
    if kind is numpy.ndarray or (isinstance(value, numpy.generic) and kind.__module__ == "numpy"):
        return _of_array(value, parts)
    if kind is torch.Tensor:
        return _of_tensor(value, parts)
    raise NotEncodable(f"a {kind.__name__}")


def _of_array(value: Any, parts: list[bytes]) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None or not value.dtype.itemsize:
        raise NotEncodable(f"an array of {value.dtype}")
    if isinstance(value, numpy.generic):
        if value.dtype.kind in "SU" and value != numpy.array(value)[()]:
            raise NotEncodable("a text of NumPy that ends with a NUL")
        parts.append(value.tobytes())
        return {"s": value.dtype.str}
    order = _order(value.strides)
    dense = value.transpose(order)
    parts.append(dense.tobytes())
    return {"a": [value.dtype.str, list(dense.shape), order]}


def _of_tensor(value: torch.Tensor, parts: list[bytes]) -> Any:
    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
        raise NotEncodable("a tensor that is sparse, on a device, or has a gradient")
    order = _order(value.stride())
    dense = value.resolve_conj().resolve_neg().permute(order).contiguous()
    parts.append(dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return {"T": [str(value.dtype).removeprefix("torch."), list(dense.shape), order]}


def _order(strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the outermost in memory: the layout is part of a tensor, and some kernels choose by it."""
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def _restored(skeleton: Any, take: Callable[[int], memoryview]) -> Any:
    if not isinstance(skeleton, dict):
        return skeleton
    ((mark, told),) = skeleton.items()
    if mark == "d":
        return {key: _restored(item, take) for key, item in told}
    if mark in ("l", "t"):
        items = [_restored(item, take) for item in told]
        return items if mark == "l" else tuple(items)
    if mark == "b":
        return bytes(take(told))
    if mark == "s":
        kind = numpy.dtype(told)
        return numpy.frombuffer(take(kind.itemsize), kind)[0]
    return _restored_array(told, mark == "T", take)


def _restored_array(told: tuple[str, list[int], list[int]], is_tensor: bool, take: Callable[[int], memoryview]) -> Any:
    name, shape, order = told
    kind: Any = getattr(torch, name) if is_tensor else numpy.dtype(name)
    content = bytearray(take(kind.itemsize * prod(shape)))
    back = sorted(range(len(order)), key=order.__getitem__)
    if not is_tensor:
        return numpy.frombuffer(content, kind).reshape(shape).transpose(back)
    raw = torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)
    return raw.reshape(shape).permute(back)
