"""Where tensors live and compute: all that depends on the kind of device is behind `Device`, and CPU is the first one.

Nothing else on the way of a step, an evaluation or a digest of what a replica holds reads a tensor from the host, seeds
a random stream or allocates a buffer. So what may have to wait for a device stands in one place, and another kind is
another class. Two things are not behind it: the bytes of a checkpoint or a state copy (`checkpoint.tensor_file`), and a
ring's sums, both of which read the tensors that they are given.
"""

import os
import platform
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import numpy
import torch
from torch.nn.functional import conv2d, layer_norm

from quorate.checkpoint.pieces import Piece
from quorate.collectives.memory import DeviceMemory
from quorate.core.digests import NamedBytes, content_digest, tensor_digest
from quorate.data.datasets import Room
from quorate.data.streams import seed_generators
from quorate.observe.event import DeviceMemoryUse

if TYPE_CHECKING:  # torch takes a second to import it, which only a mesh has
    from torch.distributed.tensor import DTensor

Model = TypeVar("Model", bound=torch.nn.Module)
Loss = Callable[[torch.nn.Module, Any], Any]
EVERYTHING = slice(None)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of 16 bits that loss() may compute in, by the name of their precision."""


class Numbers:
    """Numbers that the host has, or that are on their way there: the call waits for them, and `is_there` says whether
    they have arrived, so that it does not."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers

    def __call__(self) -> list[float]:
        return self._numbers.copy()

    def is_there(self) -> bool:
        return True


class CopyOut(Protocol):
    """Tensors of a device that are being copied to the host, beside all that is computed there.

    `hold_back` is called before anything is begun that changes these tensors: the device begins it when the copy is
    whole, and nobody waits. `wait` waits until it is whole, in a thread of its own.
    """

    def hold_back(self) -> None: ...

    def wait(self) -> None: ...

    def is_done(self) -> bool: ...


class Capture(Protocol):
    """Records what is run on a device, so that it can be run again without the Python that has led to it.

    Work is first run three times by `warm_up`, for real: libraries set themselves up meanwhile, and it is found out
    what a graph could not repeat.
    """

    def warm_up(self, work: Callable[[], None]) -> str | None:
        """Run this where it will be recorded. Why it cannot be, if something in it says so."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call this, and record it instead of running it: afterwards nothing has changed, random streams included, and
        the tensors that were made in it have no content before the first replay. Returns what runs the same kernels
        again, without waiting; random numbers go on from where the device's generator is. Raises what the call raises,
        or a RuntimeError of torch's where something cannot be recorded; the device is as before then."""
        ...

    def host_streams(self) -> Hashable:
        """The states of the random generators that no graph draws from."""
        ...


class Device:
    """One worker's device: here the host's own processor and memory, where nothing is moved and nothing waits. Another
    kind changes what is different there. Made once in a process; the replica has it, and whoever trains asks it there.

    Only `numbers`, `content` and `same_bits` bring something from the device to the host, and may have to wait for all
    that was begun on it. On a host a step calls `numbers` once a lane and once an update, elsewhere once for all lanes
    and once for the update; where it lags (`strategies.lagging`), once, and asks for them when they are there.

    Whoever exchanges tensors may read them where they lie if it `is_host`. `capture` records a lane's work, where that
    brings anything; `compiles` says whether the model that was placed is compiled, `compiles_loss` whether all of
    loss() is: what comes before and after the model costs time, too. `room` makes memory of the host that batches are
    sent from, where they are sent.
    """

    name = "cpu"
    is_host = True
    capture: Capture | None = None
    compiles = False
    compiles_loss = False
    room: Room | None = None

    def __init__(self, precision: str = "fp32") -> None:
        self.precision = precision

    @property
    def shareable(self) -> DeviceMemory:
        """Its memory, as far as other workers of the host may read it: asked where its memory is not the host's."""
        raise NotImplementedError

    def pin(self, threads: int, deterministic: bool) -> None:
        """Compute with a fixed number of threads and with kernels that give the same bits each time."""
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        # What torch.use_deterministic_algorithms does, without importing the compiler, which takes two seconds.
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
        # Filling empty tensors costs time and hides nothing here: reading one is a mistake in any mode.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def facts(self, threads: int, deterministic: bool) -> dict[str, str]:
        """Everything outside the job that the bits depend on, for the run folder and for comparing workers."""
        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "quorate": _version("quorate"),
            "device": self.name,
            "precision": self.precision,
            "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(threads),
            "deterministic": str(deterministic),
            "hash_seed": os.environ.get("PYTHONHASHSEED", "random") if sys.flags.hash_randomization else "0",
        }

    def place(self, model: Model) -> Model:
        """The model with its parameters and buffers here. Called once, before anything refers to them."""
        return model

    def compiled(self, loss: Loss) -> Loss:
        """What computes the loss of a micro-batch: the task's own loss(), or what was compiled of it."""
        return loss

    def uncompile(self, model: torch.nn.Module) -> None:
        """Have everything computed as it is written, from now on."""
        self.compiles = self.compiles_loss = False
        model._compiled_call_impl = None

    @contextmanager
    def as_written(self, model: torch.nn.Module) -> Iterator[None]:
        """Have it so in a block."""
        (compiled, model._compiled_call_impl), loss = (model._compiled_call_impl, None), self.compiles_loss
        self.compiles_loss = False
        try:
            yield
        finally:
            model._compiled_call_impl, self.compiles_loss = compiled, loss

    def tune(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose the fastest kernels that an optimizer has here, where the task has not chosen. Called once."""

    def move(self, batch: Any) -> Any:
        """A batch with its tensors here. Called for each micro-batch and evaluation batch; does not wait."""
        return batch

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory here, in which the gradients of lanes are collected and summed. Called once a generation."""
        return torch.zeros(size, dtype=dtype)

    seed: Callable[[int], None] = staticmethod(seed_generators)
    """Begin a random stream in every generator that user code may draw from: before each lane, each evaluation batch,
    and each update that runs code of the task."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Around each loss() and metrics(): the precision of the job."""
        half = HALVES.get(self.precision)
        return _AS_IT_IS if half is None else torch.autocast("cpu", half)

    def synchronize(self) -> None:
        """Wait until all that was begun here is done: before a thread of its own reads the state."""

    def limit_memory(self, share: float) -> None:
        """Let this process have so much of the device's memory at most: beyond it, memory has run out."""

    def free_unused(self) -> None:
        """Let go of memory that is kept for later, after it ran out: smaller tensors need other pieces of it."""

    def memory_use(self) -> DeviceMemoryUse | None:
        """The most that was used since it was last asked, by any thread; does not wait. None where its memory is the
        host's, of which a process is not told its own part."""
        return None

    def numbers(self, scalars: Sequence[torch.Tensor]) -> Numbers:
        """Begin to bring numbers to the host, all in one transfer. Call what it gives as late as possible."""
        return Numbers([float(scalar.item()) for scalar in scalars])

    def content(self, tensor: torch.Tensor, part: slice = EVERYTHING) -> memoryview:
        """The bytes of a tensor, or some of them, on the host; without a copy where they lie there in a row."""
        return bytes_of(tensor)[part].numpy().data

    def host_view(self, tensor: torch.Tensor) -> memoryview | None:
        """The bytes of a tensor where they lie, now and later; None where the host cannot see them as they are."""
        if tensor.device.type != "cpu" or is_spread(tensor):
            return None
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            return tensor.detach().view(-1).view(torch.uint8).numpy().data
        except (RuntimeError, TypeError, ValueError):  # strides of its own, or a kind of tensor that has no such view
            return None

    def same_bits(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
        """Of each two tensors, whether they are equal to the last bit."""
        return [same_bits(left, right) for left, right in pairs]

    def lock_pages(self, memory: "numpy.ndarray[Any, Any]") -> None:
        """Have the device read and write this memory of the host by itself, for as long as it is there. Called in
        threads, and seldom: it takes as long as to fill the memory."""

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CopyOut | None:  # noqa: ARG002
        """Begin to copy tensors, each into the first of a pair, of which all lie in memory that was locked. As they are
        when all that was begun before is done; nobody waits. None where whoever copies them may as well do it."""
        return None


CPU = Device()
_AS_IT_IS = nullcontext()


# --- tensors that are spread over the workers of a mesh (torch's DTensors); one that is not is its own local part


def is_spread(value: object) -> "TypeGuard[DTensor]":
    """Whether it is spread over a mesh, though perhaps over one worker."""
    # Whoever has one has imported its class, which takes others a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this worker has of a tensor, in place."""
    return (tensor._local_tensor if is_spread(tensor) else tensor).detach()


def assign(tensor: torch.Tensor, value: torch.Tensor | Piece) -> None:
    """Write into what this worker has of a tensor: the same part of another."""
    values = value.values if isinstance(value, Piece) else local(value)
    if values.numel():  # of what is empty here a checkpoint does not know the shape
        with torch.no_grad():
            local(tensor).copy_(values)


# --- what is asked of any device


def digests(tensors: Iterable[tuple[str, torch.Tensor]], device: Device = CPU) -> dict[str, str]:
    """A digest by name of what is held here, for comparing replicas; on CPU that of a copy on the host is the same."""
    return {
        name: tensor_digest(NamedBytes(name, str(held.dtype), tuple(held.shape), device.content(held)))
        for name, held in ((name, local(tensor)) for name, tensor in tensors)
    }


def canary(device: Device) -> str:
    """Digest of a fixed computation, equal on machines that compute alike."""
    generator = torch.Generator().manual_seed(20)
    images, kernels, matrix = device.move(
        tuple(torch.randn(*shape, generator=generator) for shape in ((2, 3, 12, 12), (8, 3, 3, 3), (72, 40)))
    )
    kernels.requires_grad_()
    convolved = conv2d(images, kernels, padding=1)
    normed = layer_norm(convolved, convolved.shape[1:])
    torch.autograd.backward((normed.tanh() * convolved).mean())
    multiplied = convolved.detach().reshape(-1, 72) @ matrix
    tiny, factors = device.move((torch.full((16,), 1e-38), torch.linspace(0.001, 0.1, 16)))
    optimizer = torch.optim.AdamW([kernels], lr=0.1)
    optimizer.step()
    results = (convolved, normed, multiplied.exp(), tiny * factors, kernels)
    return content_digest(b"".join(device.content(result) for result in results))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of the host are equal to the last bit: −0.0 is not 0.0, and a NaN equals itself."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bytes_of(left), bytes_of(right))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as bytes in a row, where it lies."""
    plain = tensor.detach().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
