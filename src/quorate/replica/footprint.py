"""How much memory a task needs, found out without that memory: its code runs on tensors that have no content.

The model, one micro-batch through loss(), the backward pass and an update of the optimizers run in torch's
`FakeTensorMode`, and `LiveMemory` adds up what lives at each moment. Code that needs the content (a mask that selects,
a number that decides) cannot run so, and is refused.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quorate.core.errors import TaskError, UserCodeError
from quorate.core.generation import MeshShape
from quorate.core.user_code import user_code
from quorate.data.collate import mapped
from quorate.lanes import chunks
from quorate.lanes.buckets import TensorShape
from quorate.replica.activation_checkpointing import checkpoint_activations, find_repeated
from quorate.replica.device import Device, local
from quorate.replica.gradients import run_backward
from quorate.replica.losses import checked_losses
from quorate.replica.optimizers import SOLE, Optimizers
from quorate.replica.replica import build_model
from quorate.spec.job import JobSpec
from quorate.task.task import Task, take_log

_READ = torch.ops.aten._local_scalar_dense.default
_CAST = torch.ops.aten._to_copy.default
_NEEDS_CONTENT = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedFakeTensorException, UnsupportedOperatorException),
)


@dataclass(frozen=True)
class ModuleSize:
    """A part of the model, and its parameters; those that it shares count where they stand first."""

    name: str
    kind: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes, for one worker with a micro-batch of `samples`.

    `kept`: what the forward pass keeps for the backward pass, without `weight_copies`, the weights in the precision in
    which they are multiplied. `working`: what both passes need beyond that at their worst moment, besides a gradient
    for each parameter. `exchanged`: where the model is cut, what both passes give to collectives, by their names.
    """

    samples: int
    modules: tuple[ModuleSize, ...]
    tensors: tuple[TensorShape, ...]
    trained: tuple[TensorShape, ...]
    buffers: int
    optimizer: int
    batch: int
    kept: int
    weight_copies: int
    working: int
    exchanged: dict[str, int]
    has_blocks: bool
    notes: tuple[str, ...]

    @property
    def weights(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def gradients(self) -> int:
        return sum(tensor.nbytes for tensor in self.trained)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one member in one step."""

    sends: int
    receives: int


def ring_traffic(buckets: Sequence[tuple[int, int]], hosting: Sequence[range]) -> tuple[Traffic, ...]:
    """For each position of the ring; `buckets` are (elements, bytes of one element)."""
    lanes = sum(len(hosted) for hosted in hosting)
    sizes = [0] * lanes
    for elements, itemsize in buckets:
        for chunk, part in enumerate(chunks.cut(elements, lanes)):
            sizes[chunk] += (part.stop - part.start) * itemsize
    return tuple(
        Traffic(
            sum(sizes[visit.chunk] for visit in visits if visit.sends),
            sum(sizes[visit.chunk] for visit in visits if visit.receives),
        )
        for visits in chunks.plan_exchange(hosting)
    )


@dataclass(frozen=True)
class Part:
    """A part of a worker's memory. `grows`: with the samples of a micro-batch."""

    name: str
    bytes: int
    note: str = ""
    grows: bool = False


@dataclass(frozen=True)
class Spread:
    """How a model is spread: units are patterns of the modules that are gathered at a time, and how many there are."""

    shape: MeshShape
    units: tuple[tuple[str, int], ...]


class SpreadPlan(Protocol):
    """What `quorate plan` asks of a strategy whose workers hold a part of the state each; its section names one."""

    @property
    def spread(self) -> Spread: ...

    def traced(self, trace: Callable[[Callable[[torch.nn.Module], None] | None], Footprint]) -> Footprint:
        """The footprint of a worker; `trace` finds that of the model after it was cut."""
        ...

    def whole(self, found: Footprint) -> Footprint:
        """With the parameters of all workers together."""
        ...

    def parts(self, found: Footprint, precision: str) -> Iterator[Part]:
        """The memory of a worker."""
        ...

    def traffic(self, found: Footprint) -> tuple[Traffic, ...]:
        """What each worker sends and receives in a step."""
        ...

    def advice(self, found: Footprint, precision: str, room: int) -> Iterator[str]:
        """What in the strategy would make it need less."""
        ...


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is active, until they are gone; each storage once.

    Code that reads a number from a tensor without content gets 1.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_key(weight) for weight in weights}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, bool]] = {}
        self.now = self.peak = self.copies = 0
        self.exchanged: Counter[str] = Counter()
        self.was_read = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # then it comes again, as what is done with the part that is here
        if function.namespace == "_c10d_functional" and isinstance(arguments[0], torch.Tensor):
            self.exchanged[function._schema.name.partition("::")[2]] += arguments[0].nbytes
        if function is _READ and isinstance(arguments[0], FakeTensor):
            self.was_read = True
            return 1.0 if arguments[0].dtype.is_floating_point else 1
        result = function(*arguments, **(named or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor):
                self._count(made, function, arguments)
        return result

    def _count(self, made: torch.Tensor, function: Any, arguments: tuple[Any, ...]) -> None:
        key = _key(made)
        if key in self._alive or key in self._weights:
            return
        storage = made.untyped_storage()
        size, is_copy = storage.nbytes(), function is _CAST and _key(arguments[0]) in self._weights
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key)), size, is_copy
        self.now += size
        self.copies += size if is_copy else 0
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        _, size, is_copy = self._alive.pop(key)
        self.now -= size
        self.copies -= size if is_copy else 0


def footprint(
    task: Task,
    spec: JobSpec,
    batch: Any,
    samples: int,
    *,
    precision: str = "fp32",
    checkpointed: bool | str = False,
    cut: Callable[[torch.nn.Module], None] | None = None,
) -> Footprint:
    """What a micro-batch of so many samples needs; `batch` is one with real content. If `cut` leaves only a part of the
    model here, then it is what that part needs."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            model = build_model(task, spec.seed)
            make_fake(model, fakes)
            if cut is not None:
                cut(model)
            return _footprint(task, model, mapped(batch, fakes.from_tensor), samples, precision, checkpointed)
    except UserCodeError as error:
        cause = error.__cause__
        if not isinstance(cause, _NEEDS_CONTENT):
            raise
        why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        raise TaskError(
            f"the task cannot be traced without content ({why}), so what it needs is not known before it runs. Leave "
            "out of model() and loss() what reads the content of a tensor, such as .tolist() or a mask that selects."
        ) from None


def _footprint(
    task: Task, model: torch.nn.Module, batch: Any, samples: int, precision: str, checkpointed: bool | str
) -> Footprint:
    parameters = [(name, local(parameter)) for name, parameter in model.named_parameters()]
    trained = [(name, local(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad]
    modules = tuple(_modules(model))
    live = LiveMemory(map(local, model.parameters()))
    if checkpointed:
        checkpoint_activations(model, checkpointed)
    optimizers = Optimizers(task, model, None)
    with live:
        with user_code("loss()"), Device(precision).autocast():
            given = task.loss(model, batch)
        losses = checked_losses(given, samples, optimizers.by_name)
        del given
        kept, copies = live.now, live.copies
        values = [(loss.name, loss.value) for loss in losses]
        del losses
        while values:
            name, value = values.pop(0)
            inputs = None if name == SOLE else optimizers.parameters(name)
            run_backward(value, 1.0, inputs, retain=bool(values))
        del value
        working = max(0, live.peak - kept - sum(parameter.nbytes for _, parameter in trained))
        was_read = live.was_read
        with user_code("optimizer.step()"):
            for optimizer in optimizers.by_name.values():
                optimizer.step()
    take_log(task)
    states = [value for o in optimizers.by_name.values() for state in o.state.values() for value in state.values()]
    in_batch: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        in_batch.append(tensor)
        return tensor

    mapped(batch, note)
    return Footprint(
        samples=samples,
        modules=modules,
        tensors=shapes_of(parameters),
        trained=shapes_of(trained),
        buffers=_bytes_of(model.buffers()),
        optimizer=_bytes_of(local(value) for value in states if isinstance(value, torch.Tensor)),
        batch=_bytes_of(in_batch),
        kept=kept - copies,
        weight_copies=copies,
        working=working,
        exchanged=dict(live.exchanged),
        has_blocks=bool(find_repeated(model)),
        notes=("loss() reads a number from a tensor; it was taken to be 1",) if was_read else (),
    )


def make_fake(model: torch.nn.Module, fakes: FakeTensorMode) -> None:
    """Tensors that came from elsewhere, such as NumPy, have content still; ties stay ties."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = fakes.from_tensor(tensor)
                kept[name] = made[id(tensor)]


def _modules(model: torch.nn.Module) -> Iterator[ModuleSize]:
    """Its parts, largest first; where it has but one, the parts of that."""
    prefix = ""
    while len(children := list(model.named_children())) == 1 and not list(model.parameters(recurse=False)):
        name, model = children[0]
        prefix += f"{name}."
    seen: set[int] = set()
    sizes = []
    own = ("(itself)", type(model).__name__, list(model.parameters(recurse=False)))
    for name, kind, parameters in [
        *((name, type(child).__name__, list(child.parameters())) for name, child in children),
        own,
    ]:
        new = [parameter for parameter in parameters if id(parameter) not in seen]
        seen.update(map(id, new))
        count, size = sum(parameter.numel() for parameter in new), sum(parameter.nbytes for parameter in new)
        if count:
            sizes.append(ModuleSize(f"{prefix}{name}", kind, count, size))
    yield from sorted(sizes, key=lambda each: -each.bytes)


def shapes_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorShape, ...]:
    """What they are in bytes, by name."""
    return tuple(TensorShape(name, str(p.dtype), p.element_size(), p.numel()) for name, p in parameters)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
