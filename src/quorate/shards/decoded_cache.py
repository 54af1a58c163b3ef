"""Samples that `decode` has made, kept on the disk: another epoch or another job reads them from there.

They are written down exactly: trees of tensors, arrays, numbers and texts. Nothing of it can run code when it is read.
"""

import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import xxhash

from quorate.data.indices import Indices
from quorate.shards.disk_cache import DiskCache

# Part of the name of all that is kept. Earlier versions of Quorate kept the samples of a block in one file.
_VERSION = "keyed-2"
_BAD = b""


class DecodedCache:
    """A file for each sample, in a folder for each block.

    They are found by the data that they were made of and by `key`, with which the user says what `decode` makes of
    these. The `records` of a block are all there, or some of them.
    """

    def __init__(self, cache: DiskCache, data: str, key: str, records: Indices) -> None:
        self._cache = cache
        # Tensors are kept as this machine has them in memory.
        self._name = xxhash.xxh3_128_hexdigest(f"{_VERSION} {sys.byteorder} {data} {key}".encode())
        self._records = records
        self._is_on = True
        # Blocks all of whose samples were there: others may have removed some since.
        self._whole: set[int] = set()
        # Of the batch that is being read; None between two of them.
        self._staged: list[tuple[int, int, bytes]] | None = None

    def _key(self, block: int, row: int) -> str:
        return f"{self._name}x{block}/samples-{row}"

    def has(self, block: int) -> bool:
        """Whether all samples of a block are there."""
        if block not in self._whole:
            kept = self._cache.path(self._key(block, 0)).parent.glob("samples-*")
            if sum(1 for _ in kept) < self._records[block]:
                return False
            self._whole.add(block)
        return True

    def get(self, block: int, row: int) -> tuple[bool, Any]:
        """Whether a sample is there, and the sample. A bad one is not: who decodes it again learns what is wrong."""
        content = self._cache.get(self._key(block, row))
        if content:
            return True, decode(content)
        self._whole.discard(block)
        return False, None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around the reading of a batch: what is made in it may be kept. What is not settled by its end, as it was left
        by an exception, is not."""
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
            self._staged.append((block, row, _BAD if is_bad else encode(sample)))
        except NotEncodable as reason:
            self._end(f"they hold {reason}")

    def settle(self, drew: bool) -> None:
        """Keep what was staged, unless random numbers were drawn."""
        staged, self._staged = self._staged or [], None
        if not self._is_on:
            return
        if drew:
            self._end("decode() draws random numbers, so they differ in every epoch")
            return
        for block, row, content in staged:
            self._cache.put(self._key(block, row), content)
        if self._cache.has_failed:
            self._end("the disk does not take them")

    def _end(self, why: str) -> None:
        self._cache.note(f"decoded samples are no longer cached: {why}")
        self._is_on = False
        self._staged = None


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
