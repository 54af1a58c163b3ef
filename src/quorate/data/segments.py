"""Memory that a loader and its worker share, kept from one batch to the next.

A batch lies in one segment: memory without a name, whose descriptor is passed once and which both have mapped from then
on. The loader fills it, the worker reads the batch where it lies, and when nothing there refers to it any more it says
so with its next request. So in the long run no memory is taken or given back, which costs the kernel more than all that
is done with a batch: every page of it is looked for, emptied and mapped, twice.
"""

import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import torch

ALIGNMENT = 64
"""Of what lies in a segment, as torch has it: which instructions a kernel uses may depend on it."""

_SPARE = 8
"""A new one is larger than its batch by one in so many: the next may be a little larger."""


@dataclass(frozen=True)
class Placed:
    """Where the pieces of a batch lie in a segment of so many bytes; `descriptor` is for whoever has not mapped it."""

    segment: int
    size: int
    places: Sequence[int]
    descriptor: int | None


@dataclass
class _Segment:
    number: int
    memory: memoryview
    descriptor: int | None

    @property
    def size(self) -> int:
        return self.memory.nbytes


class Segments:
    """Those of a loader. One is chosen for each batch: some of it is put there as it is made, by `room`, and the rest
    when it is sent, by `place`."""

    def __init__(self) -> None:
        self._free: dict[int, _Segment] = {}
        self._lent: dict[int, _Segment] = {}
        self._count = 0
        self._current: _Segment | None = None
        self._end = 0
        self._usual = 0

    def release(self, numbers: Iterable[int]) -> None:
        """The worker is done with what lies in these."""
        for number in numbers:
            self._free[number] = self._lent.pop(number)

    def begin(self) -> None:
        """A batch is about to be made, probably as large as the last."""
        self._give_up()
        if self._usual:
            self._take(self._usual)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of the batch that is being made, not filled yet; None where there is no room for it."""
        count = prod(shape)
        end = self._end + count * dtype.itemsize
        if self._current is None or not count or end > self._current.size:
            return None
        content = torch.frombuffer(self._current.memory, dtype=dtype, count=count, offset=self._end)
        self._end = _aligned(end)
        return content.view(tuple(shape))

    def place(self, pieces: Sequence[memoryview]) -> Placed | None:
        """Have all of them in one segment, which is the worker's then; None where there is no such memory to be had."""
        self._usual = sum(_aligned(piece.nbytes) for piece in pieces)
        places = self._places(pieces)
        if places is None:
            made, self._current = self._current, None
            if not self._take(self._usual) and not self._make(self._usual):
                self._current = made
                self._give_up()
                return None
            places = self._places(pieces)
            if made is not None:
                self._free[made.number] = made
        segment = self._current
        assert segment is not None and places is not None, "it is as large as they need"
        for place, piece in zip(places, pieces, strict=True):
            if _address(piece) != _address(segment.memory) + place:
                segment.memory[place : place + piece.nbytes] = piece
        self._lent[segment.number], self._current = segment, None
        descriptor, segment.descriptor = segment.descriptor, None
        return Placed(segment.number, segment.size, places, descriptor)

    def _places(self, pieces: Sequence[memoryview]) -> list[int] | None:
        """Where each lies in the present segment, or will: behind all that is there; None if that is too much."""
        if (segment := self._current) is None:
            return None
        places, begin, end = [], _address(segment.memory), self._end
        for piece in pieces:
            place = _address(piece) - begin
            if not 0 <= place < segment.size:
                place, end = end, end + _aligned(piece.nbytes)
            places.append(place)
        return (
            places
            if end <= _aligned(segment.size)
            and all(place + piece.nbytes <= segment.size for place, piece in zip(places, pieces, strict=True))
            else None
        )

    def _take(self, size: int) -> bool:
        """The smallest that is free and large enough."""
        fitting = [segment for segment in self._free.values() if segment.size >= size]
        if not fitting:
            return False
        chosen = min(fitting, key=lambda segment: segment.size)
        self._current, self._end = self._free.pop(chosen.number), 0
        return True

    def _make(self, size: int) -> bool:
        """A new one; in the place of one that is free, as that is too small."""
        number = next(iter(self._free), self._count)
        size = _aligned(size + size // _SPARE)
        descriptor = -1
        try:
            descriptor = os.memfd_create("quorate-batch", os.MFD_CLOEXEC)
            # All of it now: too little memory is an error of this call, and no SIGBUS when it is written to.
            os.posix_fallocate(descriptor, 0, size)
            memory = memoryview(mmap.mmap(descriptor, size))
        except (OSError, ValueError):
            if descriptor >= 0:
                os.close(descriptor)
            return False
        if self._free.pop(number, None) is None:
            self._count += 1
        self._current, self._end = _Segment(number, memory, descriptor), 0
        return True

    def _give_up(self) -> None:
        if self._current is not None:
            self._free[self._current.number], self._current = self._current, None
        self._end = 0


class MappedSegments:
    """Those of a loader, in its worker. `released` are the numbers of those that nothing refers to any more."""

    def __init__(self) -> None:
        self._mapped: dict[int, numpy.ndarray[Any, Any]] = {}
        self.released: list[int] = []

    def take_released(self) -> list[int]:
        """Those that the loader has not been told of yet."""
        return [self.released.pop() for _ in range(len(self.released))]

    def open(self, number: int, size: int, descriptor: int | None) -> memoryview:
        """A segment with a batch in it: it is released with the last tensor, array or view of this memory."""
        if descriptor is not None:
            self._mapped[number] = _mapped(descriptor, size)
        # A view of its own for each batch, on which all that is made of this memory depends.
        view: Any = self._mapped[number][:]
        weakref.finalize(view, self.released.append, number).atexit = False
        return memoryview(view)


def _mapped(descriptor: int, size: int) -> numpy.ndarray[Any, Any]:
    # By torch, since Python's own map keeps a descriptor open for as long as it lives. Gone with the last tensor in it.
    try:
        whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"{size:,} bytes of shared memory could not be mapped") from error
    return whole.numpy()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(memory: memoryview) -> int:
    address: int = numpy.frombuffer(memory, numpy.uint8).__array_interface__["data"][0] if memory.nbytes else 0
    return address
