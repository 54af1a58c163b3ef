"""Tensors in the safetensors format, written one at a time: a checkpoint never needs the memory of a second model."""

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
METADATA = "__metadata__"  # the one name that a safetensors file keeps for itself


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file before it is written: its size is known, its content comes in pieces."""

    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """How many bytes the file will have."""
        return len(self.header()) + sum(_size(tensor) for tensor in self.tensors.values())

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes, in order."""
        yield memoryview(self.header())
        for _, tensor in self.in_order():
            yield _bytes_of(tensor)

    def in_order(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors as they follow each other in the file."""
        # Wide types first, so that every tensor starts at a multiple of its element size.
        return sorted(self.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))

    def header(self) -> bytes:
        """What the file begins with: the length of the list of tensors, and the list."""
        entries: dict[str, object] = {}
        offset = 0
        for name, tensor in self.in_order():
            end = offset + _size(tensor)
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        padded = text.ljust(math.ceil(len(text) / ALIGNMENT) * ALIGNMENT)
        return len(padded).to_bytes(8, "little") + padded


class Arena:
    """Memory in which a file is put together while training goes on, as it will lie on the disk.

    Kept from one save to the next: taking fresh memory costs several times as much as the copy itself.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taking = threading.Lock()

    def reserve(self, size: int) -> bool:
        """Have room for so many bytes, and touch them; False where taking them could hurt somebody."""
        return self._room_for(size) is not None

    def reserve_in_background(self, size: int) -> None:
        """The same, while others go on."""
        if self._memory.numel() < size:
            threading.Thread(target=self.reserve, args=(size,), name="arena", daemon=True).start()

    def stage(self, file: TensorFile) -> tuple[memoryview, dict[str, torch.Tensor]] | None:
        """A file's whole content, and its tensors as they lie in it, valid until the next; None without the memory."""
        content = self._room_for(file.size)
        if content is None:
            return None
        header = file.header()
        content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        staged = {}
        offset = len(header)
        for name, tensor in file.in_order():
            end = offset + tensor.numel() * tensor.dtype.itemsize
            staged[name] = content[offset:end].view(tensor.dtype).view(tensor.shape)
            staged[name].copy_(tensor)
            offset = end
        return content.numpy().data, staged

    def _room_for(self, size: int) -> torch.Tensor | None:
        with self._taking:
            if self._memory.numel() < size:
                self._memory = torch.empty(0, dtype=torch.uint8)  # before more is taken: never twice the state
                if size + SPARE > free_memory():
                    return None
                # Loaders are forked, and would have every page of it copied when it is next written to.
                memory = torch.frombuffer(fresh_memory(size, is_inherited=False), dtype=torch.uint8)
                memory.zero_()
                self._memory = memory
            # Within the lock: in the background other memory may be taken at any time.
            return self._memory[:size]


def tensors_in(memory: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a file's content, as views of that memory, which they keep alive; it must be writable.

    Raises `CheckpointError` for a content that is no safetensors file, or whose list of tensors does not fit it.
    """
    entries, start = _list_of(memory)
    tensors: dict[str, torch.Tensor] = {}
    end = 0
    for entry in sorted((_entry_of(name, given) for name, given in entries.items()), key=lambda entry: entry.span):
        # As in the safetensors format: the tensors fill the file without gap or overlap.
        if entry.span[0] != end:
            raise entry.refused(f"begins at byte {entry.span[0]:,}, where the tensor before it ends at {end:,}")
        end = entry.span[1]
        if end > len(memory) - start:
            raise entry.refused(f"ends at byte {end:,} of {len(memory) - start:,}")
        tensors[entry.name] = entry.view_of(memory, start)
    if end != len(memory) - start:
        raise CheckpointError(f"the tensors take {end:,} bytes and the file has {len(memory) - start:,} for them")
    return {name: tensors[name] for name in entries}


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
            raise self.refused(f"begins at byte {begin:,}, which is no multiple of its {self.dtype.itemsize} bytes")
        try:
            if begin == end:
                return torch.empty(self.shape, dtype=self.dtype)
            content = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=start + begin)
            return content.view(self.dtype).view(self.shape)
        except RuntimeError as error:  # a shape beyond all numbers
            raise self.refused(f"cannot be read: {error}") from None


def _list_of(memory: memoryview) -> tuple[dict[str, Any], int]:
    """The list of tensors that a file begins with, and where their content begins."""
    length = int.from_bytes(memory[:8], "little")
    if len(memory) < 8 or length > len(memory) - 8:
        raise CheckpointError(f"no safetensors file: {len(memory):,} bytes do not hold a list of {length:,}")
    try:
        entries = json.loads(bytes(memory[8 : 8 + length]).decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise CheckpointError("no safetensors file: its list of tensors is not JSON") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"no safetensors file: its list of tensors is a {type(entries).__name__}")
    entries.pop(METADATA, None)
    return entries, 8 + length


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


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
