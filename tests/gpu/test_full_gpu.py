"""A GPU that is full at the start."""

import pytest
import torch

from quorate.core.errors import OutOfMemory
from quorate.replica.device import Device
from quorate.worker import assembly


class Full(Device):
    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error = error

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        raise self._error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")]
)
def test_who_fills_it_is_told(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "users_of", lambda gpu: f"process {gpu}11 (python) has 70,000 MiB")
    with pytest.raises(OutOfMemory, match=r"GPU 7 is full: process 711 \(python\) has 70,000 MiB\."):
        assembly.check_room(Full(error), "7")
    monkeypatch.setattr(assembly, "users_of", lambda _: "")
    with pytest.raises(OutOfMemory, match="nvidia-smi does not say"):
        assembly.check_room(Full(error), "7")


def test_another_error_is_none_of_memory() -> None:
    with pytest.raises(RuntimeError, match="no kernel image"):
        assembly.check_room(Full(RuntimeError("CUDA error: no kernel image is available")), "0")
