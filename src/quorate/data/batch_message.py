"""What loader processes send: pickles whose tensors and arrays travel beside them.

Small ones go through the socket. Large ones lie in memory without a name, whose descriptor is passed: it is filled
ahead of whoever takes it, no size of /dev/shm limits it, and nothing is left of it when a process is killed.
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

LEAST_SHARED = 1 << 16
"""Bytes from which a descriptor is passed: less is sooner through the socket, which also holds it until it is read."""

_LEAST_BESIDE = 1 << 12
_ALIGNMENT = 64  # as torch has it: which instructions a kernel uses may depend on it
_HEAD = struct.Struct("<QI?")
_PIECE = struct.Struct("<Qq")
_NO_STORAGE = -1


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


def send(sock: socket.socket, message: BatchMessage) -> None:
    """Send what was packed, and wait until all of it is on its way."""
    beside = [piece.memory for piece in message.beside]
    descriptor = _shared(beside)
    head = _HEAD.pack(len(message.content), len(beside), descriptor is not None)
    rest = b"".join([*(_PIECE.pack(piece.memory.nbytes, piece.begin) for piece in message.beside), message.content])
    if descriptor is None:
        sock.sendall(head + rest)
        for memory in beside:
            sock.sendall(memory)
        return
    try:
        socket.send_fds(sock, [head], [descriptor])
    finally:
        os.close(descriptor)
    sock.sendall(rest)


def receive(sock: socket.socket, wait: Callable[[], None]) -> BatchMessage:
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
        length, count, is_shared = _HEAD.unpack(head)
        rest = memoryview(bytearray(count * _PIECE.size + length))
        _fill(sock, rest, wait)
        table = list(_PIECE.iter_unpack(rest[: count * _PIECE.size]))
        sizes = [size for size, _ in table]
        if is_shared and not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel drops what this process may not have
        if is_shared:
            beside = _mapped(descriptors[0], sizes)
        else:
            beside = [_bytes(torch.empty(size, dtype=torch.uint8)) for size in sizes]
            for memory in beside:
                _fill(sock, memory, wait)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    pieces = [Piece(memory, begin) for memory, (_, begin) in zip(beside, table, strict=True)]
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


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each piece begins in shared memory, and how large that is."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def _shared(pieces: Sequence[memoryview]) -> int | None:
    """Memory that holds all of them; None where they are small, or there is no such memory to be had."""
    begins, total = _places([piece.nbytes for piece in pieces])
    if total < LEAST_SHARED:
        return None
    descriptor = -1
    try:
        descriptor = os.memfd_create("quorate-batch", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, total)
        for begin, piece in zip(begins, pieces, strict=True):
            written = 0
            while written < piece.nbytes:
                # Written, not mapped: too little memory is an error of this call, and no SIGBUS.
                written += os.pwrite(descriptor, piece[written:], begin + written)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def _mapped(descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
    begins, total = _places(sizes)
    # By torch, since Python's own map keeps a descriptor open for as long as it lives. Gone with the last tensor in it.
    try:
        whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=total, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"{total:,} bytes of shared memory could not be mapped") from error
    memory = _bytes(whole)
    return [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


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
        begin = self._begin // _ALIGNMENT * _ALIGNMENT
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
