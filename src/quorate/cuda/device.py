"""A GPU by CUDA. Work is queued there, and nobody waits for it but where numbers or bytes are brought to the host."""

import contextlib
import gc
import logging
import os
import pickle
import random
import re
import shutil
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy
import torch

from quorate.core.errors import GpuLost, RunError
from quorate.core.gpus import VISIBLE
from quorate.cuda.attention import find_kernels
from quorate.cuda.memory import CudaMemory
from quorate.data.collate import mapped
from quorate.data.streams import seed_generators
from quorate.observe.event import DeviceMemoryUse
from quorate.replica.device import (
    EVERYTHING,
    HALVES,
    CopyOut,
    Device,
    Loss,
    Model,
    Numbers,
    bytes_of,
    is_spread,
)

log = logging.getLogger(__name__)

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FUSED_IN_PARTS = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose fused kernels DTensor knows, of parameters that are spread over workers."""


def oldest_capability() -> tuple[int, int]:
    """The compute capability below which this torch has no kernels for a GPU: newer builds leave old chips out."""
    names = (re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]?", name) for name in torch.cuda.get_arch_list())
    return min(((int(name[1]), int(name[2])) for name in names if name), default=(0, 0))


class CudaDevice(Device):
    """The one GPU that this process sees."""

    name = "cuda"
    is_host = False

    def __init__(
        self, precision: str = "auto", *, compiles: bool = False, captures: bool = True, cache: Path | None = None
    ) -> None:
        # Before anything speaks to the driver: matrix products that repeat need workspaces of one size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.compiles = self.compiles_loss = compiles
        self._compiled_loss: tuple[Loss, Loss] | None = None
        if torch.version.cuda is None:
            raise RunError(
                "`device: cuda` asks for a GPU, and there is none that torch can use: this torch is built without CUDA."
            )
        if not torch.cuda.is_available():
            # As after it has fallen off the bus. Others may go on without whoever computes there.
            raise GpuLost(
                "its GPU cannot be used: the driver does not answer torch, or there is no GPU "
                f"{os.environ.get(VISIBLE)}. See whether `nvidia-smi` shows it."
            )
        self._device = torch.device("cuda", 0)
        self._sending: torch.cuda.Stream | None = None
        self._copying: torch.cuda.Stream | None = None
        self._shareable = CudaMemory(self._device)
        self.capture = CudaCapture(self._device) if captures else None
        capability = torch.cuda.get_device_capability(self._device)
        self._title = torch.cuda.get_device_name(self._device)
        self._cache = cache
        self._attention = find_kernels()
        oldest = oldest_capability()
        if capability < oldest:
            shown, least = (".".join(map(str, version)) for version in (capability, oldest))
            raise RunError(
                f"{self._title} has compute capability {shown}; {least} is the minimum that this torch supports. Use "
                "`device: cpu`, or a torch that was built for it."
            )
        has_bf16 = capability >= (8, 0)
        super().__init__(("bf16" if has_bf16 else "fp32") if precision == "auto" else precision)
        if self.precision == "bf16" and not has_bf16:
            raise RunError(f"{self._title} does not compute in bfloat16. Use `precision: fp16`, or `fp32`.")

    @property
    def shareable(self) -> CudaMemory:
        return self._shareable

    def pin(self, threads: int, deterministic: bool) -> None:
        super().pin(threads, deterministic)
        # What is timed to choose a kernel may choose another one each time.
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        if self.compiles:
            if self._cache is not None:
                use_compile_cache(self._cache, self._title, deterministic)
            pin_compiler(deterministic)

    def facts(self, threads: int, deterministic: bool) -> dict[str, str]:
        capability = torch.cuda.get_device_capability(self._device)
        return super().facts(threads, deterministic) | {
            "gpu": self._title,
            "gpu capability": ".".join(map(str, capability)),
            "cuda": str(torch.version.cuda),
            "compiled": "loss" if self.compiles_loss else "model" if self.compiles else "no",
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "attention": self._attention,
        }

    def place(self, model: Model) -> Model:
        placed: Model = model.to(self._device)
        if any(isinstance(module, torch.nn.Conv2d) for module in placed.modules()):
            # Convolutions take half of the time with the channels last.
            placed = placed.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.compiles:
            compile_in_place(placed)
        return placed

    def tune(self, optimizer: torch.optim.Optimizer) -> None:
        """One kernel for all parameters, where torch has one and the task has not chosen."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if type(optimizer) not in (_FUSED_IN_PARTS if any(map(is_spread, parameters)) else _FUSED):
            return
        for group in optimizer.param_groups:
            if group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable"):
                group["fused"] = True

    def compiled(self, loss: Loss) -> Loss:
        if not self.compiles_loss:
            return loss
        if self._compiled_loss is None or self._compiled_loss[0] != loss:
            self._compiled_loss = loss, torch.compile(loss, dynamic=False)
        return self._compiled_loss[1]

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def move(self, batch: Any) -> Any:
        return mapped(batch, self._send)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)

    def seed(self, seed: int) -> None:
        seed_generators(seed)
        torch.cuda.default_generators[self._device.index].manual_seed(seed)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", HALVES.get(self.precision), enabled=self.precision in HALVES)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def limit_memory(self, share: float) -> None:
        # Of what is there to be had now: another program may have some of it.
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share * (free + held) / total), self._device)

    def free_unused(self) -> None:
        gc.collect()  # tensors in a circle of references, as exceptions leave them
        torch.cuda.empty_cache()

    def memory_use(self) -> DeviceMemoryUse:
        # Kept by torch's allocator: nothing is asked of the driver.
        used = DeviceMemoryUse(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            total_bytes=torch.cuda.get_device_properties(self._device).total_memory,
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        return used

    def numbers(self, scalars: Sequence[torch.Tensor]) -> Numbers:
        """One transfer: what they were computed by is waited for when the numbers are asked for."""
        if not scalars:
            return Numbers([])
        # By type, so that a handful of kernels do for any number of them.
        by_type: dict[torch.dtype, list[int]] = {}
        for index, scalar in enumerate(scalars):
            by_type.setdefault(scalar.dtype, []).append(index)
        groups = (torch.stack([scalars[i].detach().reshape(()).to(self._device) for i in g]) for g in by_type.values())
        together = torch.cat([group.to(torch.float64) for group in groups])
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        return _OnTheirWay(host, [index for group in by_type.values() for index in group])

    def content(self, tensor: torch.Tensor, part: slice = EVERYTHING) -> memoryview:
        return bytes_of(tensor)[part].cpu().numpy().data

    def host_view(self, tensor: torch.Tensor) -> memoryview | None:
        return super().host_view(tensor) if tensor.device.type == "cpu" else None

    def same_bits(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
        """All of them in one transfer, and by a handful of kernels: batch norms bring hundreds of small pairs."""
        alike = [left.dtype == right.dtype and left.shape == right.shape for left, right in pairs]
        compared = [pair for pair, may_be in zip(pairs, alike, strict=True) if may_be]
        differing = iter(count_differing(compared).tolist() if compared else ())
        return [next(differing) == 0 if may_be else False for may_be in alike]

    def lock_pages(self, memory: "numpy.ndarray[Any, Any]") -> None:
        """Not taken from torch's allocator of such memory, which takes up to twice as much as it is asked for."""
        runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        # In a thread that ends: CUDA keeps an error for the thread that has met it, whose next kernel would raise it.
        with ThreadPoolExecutor(1) as thread:
            code = int(thread.submit(runtime.cudaHostRegister, address, memory.nbytes, 0).result())
        if code:
            log.warning("training waits for copies of its state: cudaHostRegister gave error %d", code)
            return
        owner = os.getpid()

        def unlock() -> None:
            if os.getpid() == owner:  # a process that was forked must not speak to the driver
                runtime.cudaHostUnregister(address)

        # An array is told before its memory goes.
        weakref.finalize(memory, unlock).atexit = False

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut | None:
        """On a stream of its own. What lies in another order than in the target is put in order by the GPU first, for
        which it needs as much memory as the largest of them takes."""
        if not any(target.is_pinned() for target, _ in pairs):
            return None
        if self._copying is None:
            self._copying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.no_grad(), torch.cuda.stream(self._copying):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                return _CopiedOut(self._device)
        except torch.OutOfMemoryError:
            return None

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """On a stream of its own: it is there while what was queued before is still being computed."""
        if tensor.device.type != "cpu":
            return tensor
        if self._sending is None:
            self._sending = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with torch.cuda.stream(self._sending):
            sent = pinned.to(self._device, non_blocking=True)
        reader = torch.cuda.current_stream(self._device)
        reader.wait_stream(self._sending)
        sent.record_stream(reader)
        return sent


class _CopiedOut:
    """What was queued on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def hold_back(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()

    def is_done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]


class _OnTheirWay(Numbers):
    """Numbers that are being copied to the host, in the order of these places."""

    def __init__(self, host: torch.Tensor, places: Sequence[int]) -> None:
        self._host = host
        self._places = places
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def __call__(self) -> list[float]:
        self._arrived.synchronize()
        read: list[float] = self._host.tolist()
        return [value for _, value in sorted(zip(self._places, read, strict=True))]

    def is_there(self) -> bool:
        return bool(self._arrived.query())  # type: ignore[no-untyped-call]


def count_differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """How many bytes differ in each pair, of which both have one shape and type."""
    left, right = (torch.cat([bytes_of(pair[side]) for pair in pairs]) for side in (0, 1))
    so_far = torch.nn.functional.pad((left != right).cumsum(0), (1, 0))
    sizes = torch.tensor([pair[0].nbytes for pair in pairs])
    ends = sizes.cumsum(0).to(so_far.device)
    return so_far[ends] - so_far[ends - sizes.to(so_far.device)]


_SYNCHRONISING = "synchronizing CUDA operation"


class CudaCapture:
    """Captures on one side stream, on which everything that will be captured is warmed up: autograd remembers the
    stream that a parameter's gradient was first accumulated on, and workspaces of cuBLAS belong to one stream.

    All graphs share a pool of memory, since they are replayed one after another on one stream, and nothing that one of
    them leaves there is read after the next but what somebody holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, work: Callable[[], None]) -> str | None:
        side, current = self._side(), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as met, torch.cuda.stream(side):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
                current.wait_stream(side)
        others = [one for one in met if _SYNCHRONISING not in str(one.message)]
        for one in others:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if len(others) == len(met):
            return None
        return "loss() or its backward pass waits for the GPU, as .item(), `if` on a tensor and indexing by a mask do"

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        side, current = self._side(), torch.cuda.current_stream(self._device)
        if not self._graphs:
            # The allocator refuses a pool whose graphs are all gone, as long as something still lies in it.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index]
        stream = generator.get_state()
        try:
            # In other threads pages may be pinned meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._recover(graph, current)
            raise
        finally:
            generator.set_state(stream)
        self._graphs.add(graph)
        return graph.replay

    def host_streams(self) -> Hashable:
        of_torch = torch.default_generator.get_state().numpy().tobytes()
        return random.getstate(), pickle.dumps(numpy.random.get_state()), of_torch

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._stream

    def _recover(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """A capture that was broken off by an error leaves its stream the current one, its pool open, and the generator
        in the middle of it. Graphs from before cannot be used after this: they have another generator's state."""
        torch.cuda.set_stream(stream)
        self._graphs.clear()
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            # It had not been ended, so torch may still refer to the graph, and nobody else gives up its memory.
            self._failed.append(graph)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        generator = torch.cuda.default_generators[self._device.index]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())


# --- torch.compile


def can_compile() -> bool:
    """Whether what torch.compile needs is installed: Triton, and a C compiler for its launchers."""
    compilers = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(name and shutil.which(name) for name in compilers)


def use_compile_cache(folder: Path, gpu: str, deterministic: bool) -> None:
    """Have compiled kernels kept in a folder, unless the user has chosen one. Before anything is compiled.

    It is named after what torch's own key lacks, such as how attention is computed, and what people look for.
    """
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    chosen = "".join(str(int(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")())) for kind in kinds)
    mode = "deterministic" if deterministic else "free"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"torch {torch.__version__} {gpu} {mode} attention {chosen}")
    for variable, kind in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(variable, str(folder.resolve() / name / kind))


def pin_compiler(deterministic: bool) -> None:
    """Have compiled code compute the same in every process, whatever it has computed before."""
    from torch._dynamo import config as tracing
    from torch._functorch import config as passes
    from torch._inductor import config as kernels

    # Kernels are not chosen by a stopwatch, which may choose another each time. Inductor's own mode still times the
    # tiles of pointwise kernels, and these round differently: a product that one tile shape fuses into the addition
    # after it is rounded by another. Equal machines then had two digests of one job.
    kernels.deterministic = deterministic
    kernels.triton.autotune_pointwise = not deterministic
    # Where too many shapes are met, an error: a worker that alone goes on without compiling has other bits.
    tracing.recompile_limit, tracing.fail_on_recompile_limit_hit = 64, True
    # Blocks that are computed again would draw from generators of their own, which are seeded once in a process and
    # run on from one lane to the next.
    passes.graphsafe_rng_functionalization = False


def compile_in_place(model: torch.nn.Module) -> None:
    """Have a model compiled when it is called: its parameters keep their names, and whoever calls it need not know."""
    call: Any = model._call_impl

    def forward(*inputs: Any, **named: Any) -> Any:
        # A function that is not torch's own: those are not looked into, and so a plain Sequential would stay as it is.
        return call(*inputs, **named)

    model._compiled_call_impl = torch.compile(forward, dynamic=False)


def number_of_graphs() -> int:
    """How many were compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def graphs_looked_up() -> tuple[int, int]:
    """How many were there already, among what is kept of other processes, of how many that were looked for there."""
    from torch._dynamo.utils import counters

    found, absent, refused = (int(counters["inductor"][f"fxgraph_cache_{how}"]) for how in ("hit", "miss", "bypass"))
    return found, found + absent + refused
