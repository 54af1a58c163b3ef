"""Memory in which a part is put together while training goes on, as it will lie in its file."""

import threading

import torch

from quorate.checkpoint.tensor_file import TensorFile
from quorate.core.memory import free_memory, fresh_memory

SPARE = 64 * 2**20
"""Bytes that are left to the others when memory is scarce."""


class Arena:
    """Kept from one save to the next: taking fresh memory costs several times as much as the copy itself."""

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
