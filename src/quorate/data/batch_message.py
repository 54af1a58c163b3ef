"""What loader processes send: pickles whose tensors and arrays travel beside them.

Small ones go through the socket. Large ones lie in memory that both processes share (`Segments`): it is filled ahead of
whoever takes it, no size of /dev/shm limits it, and nothing is left of it when a process is killed.
"""

import errno
import io
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy
import torch

ALIGNMENT = 64
"""Of what lies in a segment, as torch has it: which instructions a kernel uses may depend on it."""
_SPARE = 8
"""A new one is larger than its batch by one in so many: the next may be a little larger."""

LEAST_SHARED = 1 << 16
"""Bytes from which memory is shared: less is sooner through the socket, which also holds it until it is read."""

_LEAST_BESIDE = 1 << 12
# The length of the pickle and the number of pieces; the segment that these lie in, how large it is, and whether its
# descriptor is passed.
_HEAD = struct.Struct("<QIiQ?")
# How large it is, where in its storage it begins, and where in its segment it lies.
_PIECE = struct.Struct("<QqQ")
_NO_STORAGE = _NO_SEGMENT = -1


@dataclass(frozen=True)
class Piece:
    """Memory that goes beside a pickle: an array, or the part of a tensor's storage that begins at this byte of it."""

    memory: memoryview
    begin: int = _NO_STORAGE


@dataclass(frozen=True)
class BatchMessage:
    """A pickle, and the memory that goes beside it."""

    content: bytes | memoryview
    beside: Sequence[Piece]


def pack(content: Any) -> BatchMessage:
    """Take apart what is sent."""
    buffers: list[pickle.PickleBuffer] = []

    def stays_within(buffer: pickle.PickleBuffer) -> bool:
        is_small = buffer.raw().nbytes < _LEAST_BESIDE
        if not is_small:
            buffers.append(buffer)
        return is_small

    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5, buffer_callback=stays_within)
    pickler.dump(content)
    storages = {id(storage.buffer): storage for storage in pickler.storages.values()}
    pieces = [storages[id(buffer)].used() if id(buffer) in storages else Piece(buffer.raw()) for buffer in buffers]
    return BatchMessage(file.getvalue(), pieces)


def unpack(message: BatchMessage) -> Any:
    """Put it together again. Whatever this raises comes from the classes of what was sent."""
    beside = [piece.memory if piece.begin == _NO_STORAGE else piece for piece in message.beside]
    # What stands for a buffer is handed on as it is, whatever its type.
    return pickle.loads(message.content, buffers=beside)


@dataclass(frozen=True)
class _Segment:
    number: int
    memory: memoryview


@dataclass(frozen=True)
class Placed:
    """Where the pieces of a batch lie in a segment of so many bytes; `descriptor` is for whoever has not mapped it."""

    segment: int
    size: int
    places: Sequence[int]
    descriptor: int | None


class Segments:
    """Those of a loader: a batch lies in one of them.

    A segment is memory without a name, whose descriptor is passed once and which both have mapped from then on. When
    nothing in the worker refers to a batch any more, it says so with its next request. So in the long run no memory is
    taken or given back, which costs the kernel more than all that is done with a batch.
    """

    def __init__(self) -> None:
        self._free: dict[int, _Segment] = {}
        self._lent: dict[int, _Segment] = {}

    def release(self, numbers: Iterable[int]) -> None:
        """The worker is done with what lies in these."""
        for number in numbers:
            self._free[number] = self._lent.pop(number)

    def place(self, pieces: Sequence[memoryview]) -> Placed | None:
        """Have all of them in one segment, which is the worker's then; None where there is no such memory to be had."""
        ends = list(accumulate(_aligned(piece.nbytes) for piece in pieces))
        size, descriptor = ends[-1], None
        fitting = [segment for segment in self._free.values() if segment.memory.nbytes >= size]
        if fitting:
            segment = self._free.pop(min(fitting, key=lambda each: each.memory.nbytes).number)
        elif (made := self._made(size + size // _SPARE)) is not None:
            segment, descriptor = made
        else:
            return None
        places = [0, *ends[:-1]]
        for place, piece in zip(places, pieces, strict=True):
            segment.memory[place : place + piece.nbytes] = piece
        self._lent[segment.number] = segment
        return Placed(segment.number, segment.memory.nbytes, places, descriptor)

    def _made(self, size: int) -> tuple[_Segment, int] | None:
        """A new one with its descriptor; in the place of one that is free, as that is too small."""
        descriptor = -1
        try:
            descriptor = os.memfd_create("quorate-batch", os.MFD_CLOEXEC)
            # All of it now: too little memory is an error of this call, and no SIGBUS when it is written to.
            os.posix_fallocate(descriptor, 0, _aligned(size))
            memory = memoryview(mmap.mmap(descriptor, _aligned(size)))
        except (OSError, ValueError):
            if descriptor >= 0:
                os.close(descriptor)
            return None
        number = next(iter(self._free), len(self._free) + len(self._lent))
        self._free.pop(number, None)
        return _Segment(number, memory), descriptor


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


def send(sock: socket.socket, message: BatchMessage, segments: Segments | None = None) -> None:
    """Send what was packed, and wait until all of it is on its way."""
    beside = [piece.memory for piece in message.beside]
    placed = None
    if sum(memory.nbytes for memory in beside) >= LEAST_SHARED:
        placed = (Segments() if segments is None else segments).place(beside)
    if placed is None:
        head = _HEAD.pack(len(message.content), len(beside), _NO_SEGMENT, 0, False)
        sock.sendall(b"".join([head, _table(message, [0] * len(beside)), message.content]))
        for memory in beside:
            sock.sendall(memory)
        return
    descriptor = placed.descriptor
    head = _HEAD.pack(len(message.content), len(beside), placed.segment, placed.size, descriptor is not None)
    rest = _table(message, placed.places) + bytes(message.content)
    if descriptor is None:
        sock.sendall(head + rest)
        return
    try:
        socket.send_fds(sock, [head], [descriptor])
    finally:
        os.close(descriptor)
    sock.sendall(rest)


def _table(message: BatchMessage, places: Sequence[int]) -> bytes:
    pieces = zip(message.beside, places, strict=True)
    return b"".join(_PIECE.pack(piece.memory.nbytes, piece.begin, place) for piece, place in pieces)


def receive(sock: socket.socket, wait: Callable[[], None], segments: MappedSegments | None = None) -> BatchMessage:
    """What was sent, from a socket that does not block: `wait` returns when there may be more. EOFError at its end,
    OSError where it cannot be taken; no code but ours runs here."""
    head, descriptors = bytearray(), []
    try:
        while len(head) < _HEAD.size:
            try:
                got, passed, _, _ = socket.recv_fds(sock, _HEAD.size - len(head), 1)
            except BlockingIOError:
                wait()
                continue
            descriptors += passed
            head += got
            if not got:
                raise EOFError
        length, count, segment, size, is_passed = _HEAD.unpack(head)
        rest = memoryview(bytearray(count * _PIECE.size + length))
        _fill(sock, rest, wait)
        table = list(_PIECE.iter_unpack(rest[: count * _PIECE.size]))
        if is_passed and not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel drops what this process may not have
        if segment != _NO_SEGMENT:
            mapped = MappedSegments() if segments is None else segments
            whole = mapped.open(segment, size, descriptors[0] if is_passed else None)
            beside = [whole[place : place + length] for length, _, place in table]
        else:
            beside = [_bytes(torch.empty(size, dtype=torch.uint8)) for size, _, _ in table]
            for memory in beside:
                _fill(sock, memory, wait)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    pieces = [Piece(memory, begin) for memory, (_, begin, _) in zip(beside, table, strict=True)]
    return BatchMessage(rest[count * _PIECE.size :], pieces)


def _fill(sock: socket.socket, memory: memoryview, wait: Callable[[], None]) -> None:
    while memory.nbytes:
        try:
            count = sock.recv_into(memory)
        except BlockingIOError:
            wait()
            continue
        if not count:
            raise EOFError
        memory = memory[count:]


def _bytes(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


class _Storage:
    """A tensor's storage on its way, and which part of it is used: known when all tensors have been seen.

    A view of a few rows must not bring along the whole tensor that it was cut from.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage  # kept, so that no other gets its address
        self.buffer = pickle.PickleBuffer(_bytes(torch.empty(0, dtype=torch.uint8).set_(storage)))
        self._begin, self._end = storage.nbytes(), 0

    def use(self, begin: int, end: int) -> None:
        self._begin, self._end = min(self._begin, begin), max(self._end, end)

    def used(self) -> Piece:
        # From where a memory as aligned as the whole can begin: which instructions a kernel uses may depend on it.
        begin = self._begin // ALIGNMENT * ALIGNMENT
        return Piece(self.buffer.raw()[begin : self._end], begin)


class _Pickler(pickle.Pickler):
    """Takes tensors apart into memory and form; two tensors in one memory still share it at the other end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.storages: dict[int, _Storage] = {}

    def reducer_override(self, given: Any) -> Any:
        if type(given) is _Storage:
            return _arrived, (given.buffer,)
        if isinstance(given, torch.UntypedStorage) and given.device.type == "cpu":
            storage = self._storage(given)
            storage.use(0, given.nbytes())
            return _whole, (storage,)
        if not isinstance(given, torch.Tensor):
            return NotImplemented
        if given.requires_grad and not given.is_leaf:
            raise ValueError("a tensor that requires grad and was computed loses its graph on the way; detach() it")
        if not _is_plain(given):
            return NotImplemented  # torch's own way, which knows every kind
        storage = self._storage(given.untyped_storage())
        size, stride = tuple(given.size()), given.stride()
        offset, width = int(given.storage_offset()), given.element_size()
        if given.numel():
            length = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
            storage.use(offset * width, (offset + length) * width)
        return _tensor, (storage, given.dtype, offset, size, stride)

    def _storage(self, storage: torch.UntypedStorage) -> _Storage:
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = _Storage(storage)
        return self.storages[key]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_dense and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


@dataclass(frozen=True)
class _Arrived:
    """A storage at the other end, which begins at this byte of the one that was sent."""

    storage: torch.UntypedStorage
    begin: int


def _arrived(given: Piece | bytearray) -> _Arrived:
    memory, begin = (given.memory, given.begin) if isinstance(given, Piece) else (given, 0)
    if not len(memory):
        return _Arrived(torch.empty(0).untyped_storage(), begin)
    content = torch.frombuffer(memory, dtype=torch.uint8)
    # What came within the pickle lies anywhere.
    return _Arrived((content.clone() if isinstance(memory, bytearray) else content).untyped_storage(), begin)


def _whole(arrived: _Arrived) -> torch.UntypedStorage:
    return arrived.storage


def _tensor(
    arrived: _Arrived, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    # An empty one may lie before all that is used.
    begin = max(0, offset - arrived.begin // dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(arrived.storage, begin, size, stride)
