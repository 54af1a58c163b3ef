"""Tensors in the safetensors format, written one at a time: a checkpoint never needs the memory of a second model."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

from quorate.core.errors import CheckpointError
from quorate.core.machine import free_memory, fresh_memory

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 8
MOST_DIMENSIONS = 64
SPARE = 64 * 2**20
"""Bytes of memory that are left to the others when it is scarce."""
PIECE = 8 * 2**20
"""Bytes that are read at a time."""
METADATA = "__metadata__"  # the one name that a safetensors file keeps for itself


class TensorFile:
    """A safetensors file before it is written: its size is known, its content comes in pieces.

    `tensors` are in the order of the file, and have so many bytes together.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        # Wide types first, so that every tensor starts at a multiple of its element size.
        in_order = sorted((-tensor.dtype.itemsize, name) for name, tensor in tensors.items())
        self.tensors = {name: tensors[name] for _, name in in_order}
        self.tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())

    @cached_property
    def header(self) -> bytes:
        """What it begins with: the length of the list of tensors, and the list. Made when it is asked for: by a thread
        that writes, and not by whoever begins a save, for whom training waits."""
        entries: dict[str, object] = {}
        end = 0
        for name, tensor in self.tensors.items():
            begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        padded = text.ljust(math.ceil(len(text) / ALIGNMENT) * ALIGNMENT)
        return len(padded).to_bytes(8, "little") + padded

    @property
    def size(self) -> int:
        return len(self.header) + self.tensor_bytes

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes, in order."""
        yield memoryview(self.header)
        for tensor in self.tensors.values():
            flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


class Arena:
    """Memory in which a file is put together while training goes on, as it will lie on the disk.

    Kept from one save to the next: taking fresh memory costs several times as much as the copy itself. `prepare` is
    called with each memory that is taken, before it is used.
    """

    def __init__(self, prepare: Callable[["numpy.ndarray[Any, Any]"], None] = lambda _: None) -> None:
        self._prepare = prepare
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taking = threading.Lock()

    def reserve_in_background(self, size: int) -> None:
        """Have room for so many bytes, while others go on."""
        if self._memory.numel() < size:
            threading.Thread(target=self.reserve, args=(size,), name="arena", daemon=True).start()

    def reserve(self, size: int) -> torch.Tensor | None:
        """Have room for so many bytes, and touch them; None where taking them could hurt somebody."""
        with self._taking:
            if self._memory.numel() < size:
                self._memory = torch.empty(0, dtype=torch.uint8)  # before more is taken: never twice the state
                if size + SPARE > free_memory():
                    return None
                # Loaders are forked, and would have every page of it copied when it is next written to.
                array = numpy.frombuffer(fresh_memory(size, is_inherited=False), dtype=numpy.uint8)
                array.fill(0)
                self._prepare(array)
                self._memory = torch.from_numpy(array)
            # Within the lock: in the background other memory may be taken at any time.
            return self._memory[:size]

    def stage(self, file: TensorFile) -> tuple[memoryview, dict[str, torch.Tensor]] | None:
        """A file's whole content, and its tensors as they lie in it, valid until the next; None without the memory."""
        places = self.places(file)
        for name, tensor in () if places is None else places[1].items():
            tensor.copy_(file.tensors[name])
        return places

    def places(self, file: TensorFile) -> tuple[memoryview, dict[str, torch.Tensor]] | None:
        """The same before the tensors are copied there: their content is still that of the last file."""
        content = self.reserve(file.size)
        if content is None:
            return None
        end = len(file.header)
        content[:end] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
        staged = {}
        for name, tensor in file.tensors.items():
            begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
            staged[name] = content[begin:end].view(tensor.dtype).view(tensor.shape)
        return content.numpy().data, staged


def tensors_in(memory: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a file's content, as views of that memory, which they keep alive; it must be writable.

    Raises `CheckpointError` for a content that is no safetensors file, or whose list of tensors does not fit it.
    """
    length = _length_of_list(memory[:8], len(memory))
    start = 8 + length
    entries = _entries(memory[8:start], len(memory) - start)
    return {entry.name: entry.view_of(memory, start) for entry in entries}


def tensors_from(fill: Callable[[memoryview], None], size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of so many bytes as they stream, in the order of the file, each in memory of its own: `fill` fills a
    buffer with the next of them."""
    head = memoryview(bytearray(min(8, size)))
    fill(head)
    listed = memoryview(bytearray(_length_of_list(head, size)))
    fill(listed)
    for entry in _entries(listed, size - 8 - len(listed)):
        begin, end = entry.span
        content = torch.empty(end - begin, dtype=torch.uint8)
        view = content.numpy().data
        for start in range(0, end - begin, PIECE):
            fill(view[start : start + PIECE])
        yield entry.name, entry.shaped(content if len(content) else None)


@dataclass(frozen=True)
class _Entry:
    """A tensor as a file's list describes it; `span` is where it lies behind the list."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: tuple[int, int]

    def refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"tensor {self.name!r} of the file {why}")

    def view_of(self, memory: memoryview, start: int) -> torch.Tensor:
        begin, end = self.span
        if begin % self.dtype.itemsize:
            raise self.refused(f"begins at byte {begin:,}, which is not a multiple of its {self.dtype.itemsize} bytes")
        if begin == end:
            return self.shaped(None)
        return self.shaped(torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=start + begin))

    def shaped(self, content: torch.Tensor | None) -> torch.Tensor:
        """Its bytes as what it is; without any, an empty one."""
        try:
            if content is None:
                return torch.empty(self.shape, dtype=self.dtype)
            return content.view(self.dtype).view(self.shape)
        except RuntimeError as error:  # a shape beyond all numbers
            raise self.refused(f"cannot be read: {error}") from None


def _length_of_list(head: memoryview, size: int) -> int:
    """How long the list of tensors is that a file of this size begins with."""
    length = int.from_bytes(head, "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"no safetensors file: {size:,} bytes do not hold a list of {length:,}")
    return length


def _entries(listed: memoryview, size: int) -> list[_Entry]:
    """The tensors by the list of them, in the order of the file, which has so many bytes for them."""
    try:
        given = json.loads(bytes(listed).decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise CheckpointError("no safetensors file: its list of tensors is not JSON") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"no safetensors file: its list of tensors is a {type(given).__name__}")
    given.pop(METADATA, None)
    entries = sorted((_entry_of(name, each) for name, each in given.items()), key=lambda entry: entry.span)
    end = 0
    for entry in entries:
        # As in the safetensors format: the tensors fill the file without gap or overlap.
        if entry.span[0] != end:
            raise entry.refused(f"begins at byte {entry.span[0]:,}, where the tensor before it ends at {end:,}")
        end = entry.span[1]
        if end > size:
            raise entry.refused(f"ends at byte {end:,} of {size:,}")
    if end != size:
        raise CheckpointError(f"the tensors take {end:,} bytes and the file has {size:,} for them")
    return entries


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name comes twice")
    return content


def _entry_of(name: str, given: Any) -> _Entry:
    try:
        dtype, shape, (begin, end) = DTYPE_OF[given["dtype"]], tuple(given["shape"]), given["data_offsets"]
        whole = all(type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or len(shape) > MOST_DIMENSIONS:
        raise CheckpointError(
            f"tensor {name!r} of the file is described by {str(given)[:200]}, where a known dtype, a shape and two "
            "offsets are expected"
        )
    entry = _Entry(name, dtype, shape, (begin, end))
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise entry.refused(f"has {end - begin:,} bytes and its shape {list(shape)} needs another number of them")
    return entry
