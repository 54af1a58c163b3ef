"""Tensors in the safetensors format, written one at a time: a checkpoint never needs the memory of a second model."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch

from quorate.core.cached import cached_property
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
    start = 8 + _length_of_list(memory[:8], len(memory))

    def view(begin: int, size: int) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start + begin)

    return {entry.name: entry.made_of(view) for entry in _entries(memory[8:start], len(memory) - start)}


def tensors_from(fill: Callable[[memoryview], None], size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of so many bytes as they stream, in the order of the file, each in memory of its own: `fill` fills a
    buffer with the next of them."""
    head = memoryview(bytearray(min(8, size)))
    fill(head)
    listed = memoryview(bytearray(_length_of_list(head, size)))
    fill(listed)

    def read(_: int, size: int) -> torch.Tensor:
        content = torch.empty(size, dtype=torch.uint8)
        for start in range(0, size, PIECE):
            fill(content.numpy().data[start : start + PIECE])
        return content

    for entry in _entries(listed, size - 8 - len(listed)):
        yield entry.name, entry.made_of(read)


class _Entry(NamedTuple):
    """A tensor as a file's list describes it, and where it lies behind the list."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        if not all(type(number) is int and 0 <= number < 2**63 for number in (*self.shape, self.begin, self.end)):
            return False
        size, itemsize = self.end - self.begin, self.dtype.itemsize
        return (
            len(self.shape) <= MOST_DIMENSIONS
            and size == math.prod(self.shape) * itemsize
            and not self.begin % itemsize
        )

    def made_of(self, content: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        try:
            if self.begin == self.end:
                return torch.empty(self.shape, dtype=self.dtype)
            return content(self.begin, self.end - self.begin).view(self.dtype).view(self.shape)
        except RuntimeError as error:  # a shape beyond all numbers
            raise CheckpointError(f"tensor {self.name!r} of the file cannot be read: {error}") from None


def _length_of_list(head: memoryview, size: int) -> int:
    """How long the list of tensors is that a file of this size begins with."""
    length = int.from_bytes(head, "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"no safetensors file: {size:,} bytes do not hold a list of {length:,}")
    return length


def _entries(listed: memoryview, size: int) -> list[_Entry]:
    """The tensors by the list of them, in the order of the file, which has so many bytes for them: as in the
    safetensors format, they fill these without gap or overlap."""
    try:
        given = json.loads(bytes(listed).decode())
        entries = sorted(
            _Entry._make((*each["data_offsets"], name, DTYPE_OF[each["dtype"]], tuple(each["shape"])))
            for name, each in given.items()
            if name != METADATA
        )
        are_sound = all(entry.is_sound for entry in entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        are_sound = False
    if not are_sound or [each.begin for each in entries] + [size] != [0, *(each.end for each in entries)]:
        raise CheckpointError("no safetensors file: its list of tensors is damaged, or does not fit the file")
    return entries
