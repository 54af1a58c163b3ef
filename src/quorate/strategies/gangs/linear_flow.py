"""What passes from which linear map of a model to which: its code runs once, on tensors that have no content.

Every storage carries the names of the maps from which its content comes, up to the next map. So for a block of a
transformer it is found, whatever its modules are called, that the output projection reads nothing but the heads of
query, key and value, while what widens reads what flows past the block as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quorate.data.batch_nest import mapped
from quorate.data.streams import preserved_generators
from quorate.training.activation_checkpointing import find_repeated
from quorate.training.footprint import make_fake
from quorate.training.replica import build_model
from quorate.training.task import Task, take_log

ELSEWHERE = ""
"""What a block is given, and what leaves it: no map of its own."""
_PARAMETER = "(a parameter)"
_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)
_READ = _aten._local_scalar_dense.default


@dataclass
class Passage:
    """One map: what arrives at it, and where its output goes. `pieces` and `heads`: the sizes into which the last
    dimension of its output is split first, and the dimensions as which it, or a piece, is then seen. `inside`: the
    modules that were being called, from the outermost."""

    arrives: set[str] = field(default_factory=set)
    goes_to: set[str] = field(default_factory=set)
    pieces: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinearFlow:
    """The maps that were called, in the order of their first calls; whose weights are read by others than their own
    module; the blocks that the model repeats."""

    passages: dict[str, Passage]
    read_elsewhere: frozenset[str]
    blocks: tuple[str, ...]


def is_map(module: torch.nn.Module) -> bool:
    """Whether it multiplies its input by a matrix, or looks up rows of one: what can be cut across."""
    if not isinstance(module._parameters.get("weight"), torch.Tensor):
        return False
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding) or is_transposed(module)


def is_transposed(module: torch.nn.Module) -> bool:
    """The Conv1D of GPT-2's first code: a linear map, whose weight lies the other way round."""
    return type(module).__name__ == "Conv1D" and getattr(module, "nf", None) is not None


def flow_of_task(task: Task, seed: int, batch: Any) -> tuple[torch.nn.Module, LinearFlow]:
    """The model, without content, and what passes through it when loss() reads a batch.

    It raises whatever code raises that needs content.
    """
    with preserved_generators(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        model = build_model(task, seed)
        make_fake(model, fakes)
        fake = mapped(batch, fakes.from_tensor)
        try:
            return model, trace_flow(model, lambda: task.loss(model, fake))
        finally:
            take_log(task)


def trace_flow(model: torch.nn.Module, run: Callable[[], object]) -> LinearFlow:
    """What passes through the model while `run` calls it."""
    blocks = find_repeated(model)
    tracer = _Tracer(model)
    with ExitStack() as hooks, tracer:
        for name, module in model.named_modules():
            handles = (
                module.register_forward_pre_hook(tracer.enters(name, is_map(module), name in blocks), with_kwargs=True),
                module.register_forward_hook(tracer.leaves(name, is_map(module), name in blocks), always_call=True),
            )
            for handle in handles:
                hooks.callback(handle.remove)
        run()
    return LinearFlow(tracer.passages, frozenset(tracer.read_elsewhere), blocks)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands names on from the arguments of each operation to its results."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.passages: dict[str, Passage] = {}
        self.read_elsewhere: set[str] = set()
        self._from: dict[int, frozenset[str]] = {}
        self._kept: list[Any] = []
        """Storages stay alive, since one that is gone leaves its number to the next; they have no content."""
        self._calls: list[str] = []
        self._maps: set[str] = set()
        self._weights: dict[int, set[str]] = {}
        for name, module in model.named_modules():
            if is_map(module):
                self._maps.add(name)
            for parameter in module.parameters(recurse=False):
                self._name(parameter, frozenset({_PARAMETER}))
                if name in self._maps:
                    self._weights.setdefault(_key(parameter), set()).add(name)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        if function is _READ and isinstance(arguments[0], FakeTensor):
            return 1.0 if arguments[0].dtype.is_floating_point else 1
        result = function(*arguments, **(named or {}))
        given = _tensors((arguments, named))
        for tensor in given:
            owners = self._weights.get(_key(tensor))
            if owners and not (self._calls and self._calls[-1] in owners):
                self.read_elsewhere |= owners
        sources: frozenset[str] = frozenset().union(*(self._sources(tensor) for tensor in given))
        if function in _VIEWS or function in _SPLITS:
            self._note_shape(function, arguments, result, sources)
        for made in _tensors(result):
            self._name(made, sources | self._sources(made))
        return result

    def enters(self, name: str, is_map: bool, is_block: bool) -> Callable[..., None]:
        def hook(_: torch.nn.Module, arguments: Any, named: Any) -> None:
            self._calls.append(name)
            given = _tensors((arguments, named))
            if is_block:
                self._pass_on(given, ELSEWHERE)
                for tensor in given:
                    # What else only comes from the batch, such as a mask, is for everybody.
                    if tensor is given[0] or self._sources(tensor):
                        self._name(tensor, frozenset({ELSEWHERE}))
            if is_map:
                passage = self.passages.setdefault(name, Passage(inside=tuple(self._calls[:-1])))
                passage.inside = shared_start(passage.inside, tuple(self._calls[:-1]))
                passage.arrives |= self._pass_on(given, name)

        return hook

    def leaves(self, name: str, is_map: bool, is_block: bool) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _arguments: Any, result: Any) -> None:
            while self._calls and self._calls.pop() != name:
                pass
            if is_map:
                for tensor in _tensors(result):
                    self._name(tensor, frozenset({name}))
            if is_block or not self._calls:
                self._pass_on(_tensors(result), ELSEWHERE)

        return hook

    def _pass_on(self, tensors: Iterable[torch.Tensor], receiver: str) -> set[str]:
        sources = {source for tensor in tensors for source in self._sources(tensor)} - {_PARAMETER}
        for source in sources & self.passages.keys():
            self.passages[source].goes_to.add(receiver)
        return sources

    def _note_shape(self, function: Any, arguments: tuple[Any, ...], result: Any, sources: frozenset[str]) -> None:
        if self._calls and self._calls[-1] in self._maps:
            return  # how a map itself sees its input
        # Also those of which several were added up, or to which a norm has brought its weight.
        passages = [self.passages[source] for source in sources if source in self.passages]
        whole = arguments[0].shape
        if function in _VIEWS:
            for passage in passages:
                passage.heads = passage.heads or _split_last(whole, result.shape)
        elif len(passages) == 1 and arguments[2:] and arguments[2] in (-1, len(whole) - 1) and not passages[0].heads:
            # Not of heads that were seen before: those are split one by one, such as for rotary embeddings.
            passages[0].pieces = passages[0].pieces or tuple(piece.shape[-1] for piece in result)

    def _sources(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._from.get(_key(tensor), frozenset())

    def _name(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        if _key(tensor) not in self._from:
            self._kept.append(tensor.untyped_storage())
        self._from[_key(tensor)] = sources


def _split_last(whole: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions, two at least, that a view has made of the last one; a single head is one too."""
    if not len(whole):
        return ()
    if tuple(shape) == (*whole[:-1], 1, whole[-1]):
        return tuple(shape[-2:])
    for count in range(2, len(shape) + 1):
        if prod(shape[-count:]) == whole[-1] and shape[-1] != whole[-1]:
            return tuple(shape[-count:])
    return ()


def shared_start(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """The outermost modules of two calls, up to where they part."""
    count = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:count]


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def names_inside(flow: LinearFlow, block: str) -> Iterator[str]:
    """The maps of a block, in the order of their calls."""
    return (name for name in flow.passages if name.startswith(f"{block}."))
