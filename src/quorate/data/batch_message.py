"""What loader processes send: pickles whose tensors and arrays travel beside them.

Small ones go through the socket. Large ones lie in memory that both processes share (`segments`): it is filled ahead of
whoever takes it, no size of /dev/shm limits it, and nothing is left of it when a process is killed.
"""

import errno
import io
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quorate.data.segments import ALIGNMENT, MappedSegments, Segments

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
