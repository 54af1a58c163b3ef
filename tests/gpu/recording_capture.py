"""Capture as a CPU can have it: operators are recorded one by one, and run again on the tensors that they were run on.

As with a CUDA graph no Python of the task runs at a replay, what reads a number stops a recording, and a recording
leaves everything as it was. A tensor that went in past the static ones, or moved since, is read where it was.
"""

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)


class RecordingCapture:
    """Counts what it does."""

    def __init__(self) -> None:
        self.warm_ups = self.records = self.replays = 0

    def warm_up(self, work: Callable[[], None]) -> str | None:
        self.warm_ups += 1
        with _Reading() as reading:  # type: ignore[no-untyped-call]
            work()
        return f"loss() waits for the device ({reading.found})" if reading.found else None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        stream = torch.default_generator.get_state()
        with _Recording() as recording:
            try:
                work()
            finally:
                torch.default_generator.set_state(stream)
        recording.undo()
        self.records += 1
        return RecordedGraph(self, recording.calls).replay

    def host_streams(self) -> Hashable:
        return random.getstate(), str(numpy.random.get_state())


class RecordedGraph:
    def __init__(self, capture: RecordingCapture, calls: list[Any]) -> None:
        self._capture = capture
        self._calls = calls

    def replay(self) -> None:
        self._capture.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for operator, arguments, keywords, is_grad_enabled, results in self._calls:
                with torch.set_grad_enabled(is_grad_enabled):  # some kernels keep less without
                    made = _tensors(operator(*arguments, **keywords))
                for old, new in zip(results, made, strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


class _Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What reads a number."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found = str(func)
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []
        self._made: set[int] = set()
        self._before: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for tensor in _tensors((args, kwargs)):
            part = tensor.data_ptr(), tensor.shape, tensor.stride()
            if tensor.untyped_storage().data_ptr() not in self._made and part not in self._before:
                self._before[part] = tensor, tensor.detach().clone()
        outcome = func(*args, **kwargs)
        results = _tensors(outcome)
        known = {tensor.untyped_storage().data_ptr() for tensor, _ in self._before.values()}
        self._made |= {one.untyped_storage().data_ptr() for one in results} - known
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        self.calls.append((func, *detached, torch.is_grad_enabled(), [one.detach() for one in results]))
        return outcome

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, before in self._before.values():
                if not torch.equal(tensor, before):
                    tensor.detach().copy_(before)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
