"""How much memory a task needs, found out without that memory: its code runs on tensors that have no content.

The model, one micro-batch through loss(), the backward pass and an update of the optimizers run in torch's
`FakeTensorMode`, and `LiveMemory` adds up what lives at each moment. Code that needs the content (a mask that selects,
a number that decides) cannot run so; a small model is then built and run for real, and counted in the same way.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quorate.core.errors import QuorateError, TaskError
from quorate.core.machine import free_memory
from quorate.core.user_code import user_code
from quorate.data.collate import mapped
from quorate.lanes.buckets import TensorShape
from quorate.spec.job import JobSpec
from quorate.training.activation_checkpointing import checkpoint_activations, chosen_blocks, find_repeated
from quorate.training.device import Device
from quorate.training.gradients import run_backward
from quorate.training.losses import checked_losses
from quorate.training.optimizers import SOLE, Optimizers
from quorate.training.replica import build_model
from quorate.training.sharded_tensors import local
from quorate.training.task import Task, take_log

_READ = torch.ops.aten._local_scalar_dense.default
_CAST = torch.ops.aten._to_copy.default
_LOG_SOFTMAX = torch.ops.aten._log_softmax.default
MOST_FOR_REAL = 8
"""Samples of a micro-batch that are run for real, where it cannot be traced; memory grows in proportion to them."""


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
    for each parameter; compiled kernels reuse memory that is free by then, so of theirs it is one block that is
    computed again. `exchanged`: where the model is cut, what both passes give to collectives, by their names.
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


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is active, until they are gone; each storage once.

    With `fused` as a compiler would have them: of log-softmax the input is kept, in the type in which it was computed,
    since that is what kernels compute it from again. Code that reads a number from a tensor without content gets 1.
    `block` is what the largest block has kept that is computed again in the backward pass.
    """

    def __init__(self, *, fused: bool = False, limit: int | None = None, weights: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fused = fused
        self._limit = limit
        self._weights = {_key(weight) for weight in weights}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, bool]] = {}
        self._cast_from: dict[int, int] = {}
        self.now = self.peak = self.copies = self.block = 0
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
        size = storage.nbytes()
        is_copy = False
        if function is _CAST:
            is_copy = _key(arguments[0]) in self._weights
            self._cast_from[key] = arguments[0].untyped_storage().nbytes()
        elif function is _LOG_SOFTMAX and self._fused:
            size = min(size, self._cast_from.get(_key(arguments[0]), size))
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key)), size, is_copy
        self.now += size
        self.copies += size if is_copy else 0
        self.peak = max(self.peak, self.now)
        if self._limit is not None and self.now > self._limit:
            raise MemoryError(f"more than {self._limit:,} bytes")

    def _gone(self, key: int) -> None:
        _, size, is_copy = self._alive.pop(key)
        self._cast_from.pop(key, None)
        self.now -= size
        self.copies -= size if is_copy else 0


def footprint(
    task: Task,
    spec: JobSpec,
    batch: Callable[[int], Any],
    samples: int,
    *,
    precision: str = "fp32",
    fused: bool = False,
    checkpointed: bool | str = False,
    cut: Callable[[torch.nn.Module], None] | None = None,
) -> Footprint:
    """What a micro-batch of so many samples needs; `batch` gives one with real content. If `cut` leaves only a part of
    the model here, then it is what that part needs."""
    make = _Tracing(task, spec, precision, fused, checkpointed, cut)
    try:
        return make.on_fakes(batch(samples), samples)
    except Exception as error:
        if cut is not None:
            raise
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    fewer = min(samples, MOST_FOR_REAL)
    found = make.for_real(batch(fewer), fewer, why)
    return _scaled(found, samples / fewer, samples)


@dataclass(frozen=True)
class _Tracing:
    task: Task
    spec: JobSpec
    precision: str
    fused: bool
    checkpointed: bool | str
    cut: Callable[[torch.nn.Module], None] | None

    def on_fakes(self, batch: Any, samples: int) -> Footprint:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            model = build_model(self.task, self.spec.seed)
            make_fake(model, fakes)
            if self.cut is not None:
                self.cut(model)
            return self._run(model, mapped(batch, fakes.from_tensor), samples, ())

    def for_real(self, batch: Any, samples: int, why: str) -> Footprint:
        """The same with content, as long as it takes no more than half of the memory that is free."""
        limit = free_memory() // 2
        note = f"the task cannot be traced without content ({why}), so it was run for real, with {samples} samples"
        try:
            with LiveMemory(limit=limit):
                model = build_model(self.task, self.spec.seed)
            return self._run(model, batch, samples, (note,), limit)
        except (MemoryError, QuorateError) as error:
            cause = error if isinstance(error, MemoryError) else error.__cause__
            if not isinstance(cause, MemoryError):
                raise
            raise TaskError(
                f"the task cannot be traced without content ({why}), and it is too large to be run for real here: it "
                f"takes more than {limit / 1e9:.3g} GB, half of what is free. Leave out of model() and loss() what "
                "reads the content of a tensor, such as .tolist() or a mask that selects."
            ) from None

    def _run(
        self, model: torch.nn.Module, batch: Any, samples: int, notes: tuple[str, ...], limit: int | None = None
    ) -> Footprint:
        parameters = [(name, local(parameter)) for name, parameter in model.named_parameters()]
        trained = [(name, local(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for _, parameter in trained)
        modules = tuple(_modules(model))
        live = LiveMemory(fused=self.fused, limit=limit, weights=map(local, model.parameters()))
        if self.checkpointed:
            for block in chosen_blocks(model, self.checkpointed):
                _measure(model.get_submodule(block), live)
            checkpoint_activations(model, self.checkpointed)
        optimizers = Optimizers(self.task, model, None)
        with live, _without_log(self.task):
            with user_code("loss()"), Device(self.precision).autocast():
                given = self.task.loss(model, batch)
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
            working = live.block if self.fused else max(0, live.peak - kept - gradients)
            was_read = live.was_read
            with user_code("optimizer.step()"):
                for optimizer in optimizers.by_name.values():
                    optimizer.step()
        states = [value for o in optimizers.by_name.values() for state in o.state.values() for value in state.values()]
        if was_read:
            notes = (*notes, "loss() reads a number from a tensor; it was taken to be 1")
        return Footprint(
            samples=samples,
            modules=modules,
            tensors=shapes_of(parameters),
            trained=shapes_of(trained),
            buffers=_bytes_of(model.buffers()),
            optimizer=_bytes_of(local(value) for value in states if isinstance(value, torch.Tensor)),
            batch=_bytes_of(each for each in _tensors_in(batch)),
            kept=kept - copies,
            weight_copies=copies,
            working=working,
            exchanged=dict(live.exchanged),
            has_blocks=bool(find_repeated(model)),
            notes=notes,
        )


@contextmanager
def _without_log(task: Task) -> Iterator[None]:
    try:
        yield
    finally:
        take_log(task)


def _scaled(found: Footprint, factor: float, samples: int) -> Footprint:
    batch, kept, working = (round(factor * size) for size in (found.batch, found.kept, found.working))
    return replace(found, samples=samples, batch=batch, kept=kept, working=working)


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


def _measure(block: torch.nn.Module, live: LiveMemory) -> None:
    """Note what a block keeps when it is computed again."""
    forward = block.forward

    def measured(*arguments: Any, **named: Any) -> Any:
        before = live.now
        try:
            return forward(*arguments, **named)
        finally:  # computing again ends by an exception, as soon as all is there
            live.block = max(live.block, live.now - before)

    block.forward = measured


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


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(batch, note)
    return found


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
