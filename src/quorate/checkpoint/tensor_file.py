"""Tensors in the safetensors format, written one at a time: a checkpoint never needs the memory of a second model."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load

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
ALIGNMENT = 8


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file before it is written: its size is known, its content comes in pieces."""

    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        """How many bytes the file will have."""
        return len(self._header()) + sum(_size(tensor) for tensor in self.tensors.values())

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes, in order."""
        yield memoryview(self._header())
        for _, tensor in self._in_order():
            yield _bytes_of(tensor)

    def _in_order(self) -> list[tuple[str, torch.Tensor]]:
        # Wide types first, so that every tensor starts at a multiple of its element size.
        return sorted(self.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))

    def _header(self) -> bytes:
        entries: dict[str, object] = {}
        offset = 0
        for name, tensor in self._in_order():
            end = offset + _size(tensor)
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        padded = text.ljust(math.ceil(len(text) / ALIGNMENT) * ALIGNMENT)
        return len(padded).to_bytes(8, "little") + padded


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, in memory of their own: what happens to the file later does not reach them."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)


def read_tensors_from(content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a file's content, in memory of their own."""
    return {name: tensor.clone() for name, tensor in load(content).items()}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
