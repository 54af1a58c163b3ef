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
from typing import Any

import torch

LEAST_SHARED = 1 << 16
"""Bytes from which a descriptor is passed: less is sooner through the socket, which also holds it until it is read."""

_LEAST_BESIDE = 1 << 12
_ALIGNMENT = 64  # as torch has it: which instructions a kernel uses may depend on it
_HEAD = struct.Struct("<QI?")
_SIZE = struct.Struct("<Q")

Pieces = Sequence[memoryview]
Packed = tuple[bytes, Pieces]


def pack(content: Any) -> Packed:
    """The pickle, and the memory that goes beside it."""
    beside: list[memoryview] = []

    def stays_within(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= _LEAST_BESIDE:
            beside.append(memory)
        return memory.nbytes < _LEAST_BESIDE

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=stays_within).dump(content)
    return file.getvalue(), beside


def send(sock: socket.socket, packed: Packed) -> None:
    """Send what was packed, and wait until all of it is on its way."""
    content, beside = packed
    descriptor = _shared(beside)
    head = _HEAD.pack(len(content), len(beside), descriptor is not None)
    rest = b"".join([*(_SIZE.pack(memory.nbytes) for memory in beside), content])
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


def receive(sock: socket.socket, wait: Callable[[], None]) -> Any:
    """What was sent, from a socket that does not block: `wait` returns when there may be more. EOFError at its end."""
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
        rest = memoryview(bytearray(count * _SIZE.size + length))
        _fill(sock, rest, wait)
        sizes = [size for (size,) in _SIZE.iter_unpack(rest[: count * _SIZE.size])]
        if is_shared and not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel drops what this process may not have
        beside = _mapped(descriptors[0], sizes) if is_shared else _read(sock, sizes, wait)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return pickle.loads(rest[count * _SIZE.size :], buffers=beside)


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


def _read(sock: socket.socket, sizes: Sequence[int], wait: Callable[[], None]) -> Pieces:
    pieces = [_bytes(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    for memory in pieces:
        _fill(sock, memory, wait)
    return pieces


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each piece begins in shared memory, and how large that is."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def _shared(pieces: Pieces) -> int | None:
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


def _mapped(descriptor: int, sizes: Sequence[int]) -> Pieces:
    begins, total = _places(sizes)
    # By torch, since Python's own map keeps a descriptor open for as long as it lives. Gone with the last tensor in it.
    whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=total, dtype=torch.uint8)
    memory = _bytes(whole)
    return [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _bytes(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


class _Pickler(pickle.Pickler):
    """Takes tensors apart into memory and form; two tensors in one memory still share it at the other end."""

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, torch.UntypedStorage) and given.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_bytes(torch.empty(0, dtype=torch.uint8).set_(given))),)
        if not isinstance(given, torch.Tensor):
            return NotImplemented
        if given.requires_grad and not given.is_leaf:
            raise ValueError("a tensor that requires grad and was computed loses its graph on the way; detach() it")
        if not _is_plain(given):
            return NotImplemented  # torch's own way, which knows every kind
        form = given.dtype, given.storage_offset(), given.size(), given.stride()
        return _tensor, (given.untyped_storage(), *form)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_dense and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def _storage(memory: memoryview | bytearray) -> torch.UntypedStorage:
    if not len(memory):
        return torch.empty(0).untyped_storage()
    content = torch.frombuffer(memory, dtype=torch.uint8)
    # What came within the pickle lies anywhere.
    return (content.clone() if isinstance(memory, bytearray) else content).untyped_storage()
