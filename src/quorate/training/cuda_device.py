"""A GPU by CUDA. Work is queued there, and nobody waits for it but where numbers or bytes are brought to the host."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from quorate.core.errors import RunError
from quorate.data.streams import seed_generators
from quorate.training.device import EVERYTHING, CpuDevice, Model, Numbers

OLDEST = (7, 0)
"""The compute capability below which torch has no kernels for a GPU."""
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare_environment() -> None:
    """Before anything speaks to the driver: matrix products that repeat need workspaces of one size."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")


class CudaDevice(CpuDevice):
    """The one GPU that this process sees."""

    name = "cuda"
    is_host = False

    def __init__(self, precision: str = "auto", *, compiles: bool = False, is_lone_lane: bool = False) -> None:
        prepare_environment()
        self._compiles = compiles
        self._is_lone_lane = is_lone_lane
        if not torch.cuda.is_available():
            why = "this torch is built without CUDA" if torch.version.cuda is None else "its driver does not answer"
            raise RunError(f"`device: cuda` asks for a GPU, and there is none that torch can use: {why}.")
        self._device = torch.device("cuda", 0)
        capability = torch.cuda.get_device_capability(self._device)
        self._title = torch.cuda.get_device_name(self._device)
        if capability < OLDEST:
            shown, least = (".".join(map(str, version)) for version in (capability, OLDEST))
            raise RunError(f"{self._title} has compute capability {shown}, and {least} is the least that torch serves.")
        has_bf16 = capability >= (8, 0)
        super().__init__(("bf16" if has_bf16 else "fp32") if precision == "auto" else precision)
        if self.precision == "bf16" and not has_bf16:
            raise RunError(f"{self._title} does not compute in bfloat16. Use `precision: fp32`.")

    def pin(self, threads: int, deterministic: bool) -> None:
        super().pin(threads, deterministic)
        # What is timed to choose a kernel may choose another one each time.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        if self._compiles:
            from torch._dynamo import config as tracing
            from torch._inductor import config as kernels

            # Kernels are not chosen by a stopwatch, which may choose another each time.
            kernels.deterministic = deterministic
            # Where too many shapes are met, an error: a worker that alone goes on without compiling has other bits.
            tracing.recompile_limit, tracing.fail_on_recompile_limit_hit = 64, True

    def facts(self, threads: int, deterministic: bool) -> dict[str, str]:
        capability = torch.cuda.get_device_capability(self._device)
        return super().facts(threads, deterministic) | {
            "gpu": self._title,
            "gpu capability": ".".join(map(str, capability)),
            "cuda": str(torch.version.cuda),
            "compiled": str(self._compiles),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }

    def place(self, model: Model) -> Model:
        placed: Model = model.to(self._device)
        if any(isinstance(module, torch.nn.Conv2d) for module in placed.modules()):
            # Convolutions take half of the time with the channels last.
            placed = placed.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self._compiles:
            # In place: its parameters keep their names, and whoever calls it need not know.
            placed.compile(dynamic=False)
        return placed

    def tune(self, optimizer: torch.optim.Optimizer) -> None:
        """One kernel for all parameters, where torch has one and the task has not chosen. It wants gradients that lie
        as the parameters do, which those of several lanes do not."""
        if type(optimizer) not in _FUSED or not self._is_lone_lane:
            return
        for group in optimizer.param_groups:
            if group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable"):
                group["fused"] = True

    def move(self, batch: Any) -> Any:
        return _moved(batch, self._send)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)

    def seed(self, seed: int) -> None:
        seed_generators(seed)
        torch.cuda.default_generators[self._device.index].manual_seed(seed)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def numbers(self, scalars: Sequence[torch.Tensor]) -> Numbers:
        """One transfer: what they were computed by is waited for when the numbers are asked for."""
        if not scalars:
            return list
        together = torch.stack([scalar.detach().reshape(()).to(self._device, torch.float64) for scalar in scalars])
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def read() -> list[float]:
            arrived.synchronize()
            read_out: list[float] = host.tolist()
            return read_out

        return read

    def content(self, tensor: torch.Tensor, part: slice = EVERYTHING) -> memoryview:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return flat[part].cpu().numpy().data

    def host_view(self, tensor: torch.Tensor) -> memoryview | None:
        return super().host_view(tensor) if tensor.device.type == "cpu" else None

    def same_bits(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
        """All of them in one transfer, and by a handful of kernels: batch norms bring hundreds of small pairs."""
        alike = [left.dtype == right.dtype and left.shape == right.shape for left, right in pairs]
        compared = [pair for pair, may_be in zip(pairs, alike, strict=True) if may_be]
        differing = iter(count_differing(compared).tolist() if compared else ())
        return [next(differing) == 0 if may_be else False for may_be in alike]

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _moved(batch: Any, send: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of dicts, lists, tuples and dataclasses, with its tensors sent."""
    if isinstance(batch, torch.Tensor):
        return send(batch)
    if isinstance(batch, dict):
        return type(batch)({key: _moved(value, send) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, send) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, send) for value in batch)
    if hasattr(batch, "__dataclass_fields__") and not isinstance(batch, type):
        fields = {name: _moved(getattr(batch, name), send) for name in batch.__dataclass_fields__}
        return type(batch)(**fields)
    return batch


def count_differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """How many bytes differ in each pair, of which both have one shape and type."""
    left, right = (torch.cat([_bytes(pair[side]) for pair in pairs]) for side in (0, 1))
    so_far = torch.nn.functional.pad((left != right).cumsum(0), (1, 0))
    sizes = torch.tensor([pair[0].nbytes for pair in pairs])
    ends = sizes.cumsum(0).to(so_far.device)
    return so_far[ends] - so_far[ends - sizes.to(so_far.device)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
