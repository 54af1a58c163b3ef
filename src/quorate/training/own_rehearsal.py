"""A worker that would join now, played beforehand: what it makes of a batch shows what `main` keeps to itself."""

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from quorate.core.errors import QuorateError, UnsupportedModelError
from quorate.data.sampler import Sampler
from quorate.data.streams import preserved_generators
from quorate.training.own_audit import numbers_of, same_numbers
from quorate.training.own_run import Run
from quorate.training.progress import Progress
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch

if TYPE_CHECKING:
    from quorate.training.own_loop import OwnLoop

EARLY = 8
"""Up to here every step after the first is rehearsed."""
LARGEST = 2**30
"""Bytes of parameters up to which there is room for a second model."""
_DEEPEST, _MOST = 2, 100
"""So far two values are compared, to tell which variables differ."""


def is_rehearsed(step: int, sampler: Sampler) -> bool:
    """Early, and more and more seldom; and where an epoch begins or ends."""
    epoch, within = divmod(step - 1, sampler.steps_per_epoch)
    is_at_border = within < 2 or within == sampler.steps_per_epoch - 1
    return step > 1 and (step <= EARLY or step & (step - 1) == 0 or (is_at_border and epoch & (epoch - 1) == 0))


class Rehearsal:
    """Another run of `main`, brought to the same place as a worker that joins is, on a copy of the state."""

    def __init__(self, main: "OwnLoop", replica: Replica, progress: Progress, sampler: Sampler) -> None:
        self._first, self._state, self._step = main, replica, progress.cursor.step
        self._differ: list[str] = []
        self.main = main.another()
        with self._tried():
            self._replica = Replica(self.main, replica.spec, replica.device)
            self.main.build_on(main)
            self._watch = StateWatch(self.main, self._replica)
            self.main.take_up(progress, sampler)
            self.take_state()
            self.main.enter(
                progress, sampler, range(1, 2), self._watch
            )  # not the first lane, whose host prints and writes
            self._differ = differing(main.frame, self.main.frame)

    def take_state(self) -> None:
        """Have what the first one has now."""
        state = self._state.state()
        tensors = state.pop("tensors")
        self._replica.load({**copy.deepcopy(state), "tensors": tensors})  # these are copied where they are loaded

    def compare_loss(self, batch: Any, found: Sequence[torch.Tensor]) -> None:
        """Refuse a `main` that makes another loss, or another gradient, of the same batch."""
        with self._tried():
            self._replica.begin_lane()
            loss = self.main.loss_of(batch, is_last=True)
            again = numbers_of(loss, [p for _, p in self._replica.trainable])
            self._watch.begin_again()
        if not same_numbers(found, again):
            raise self._refused("gives another loss or gradient for the same batch")

    def compare_turn(self, progress: Progress, value: Any, when: str) -> None:
        """Refuse a `main` that makes something else of its turn between two steps, which the first one has had."""
        with self._tried():
            kept = self.main.advance(progress, value, when).kept
            own, others = self._replica.optimizers.settings.values(), self._state.optimizers.settings.values()
        changed = next((name for name, text in others.items() if own.get(name) != text), None)
        if changed is not None:
            raise self._refused(f"sets {changed} to {own.get(changed)}, and not to {others[changed]}")
        if kept != self._first.kept:
            raise self._refused("has another run.state, or other attributes or modes of modules")

    def close(self) -> None:
        self.main.give_up()

    @contextmanager
    def _tried(self) -> Iterator[None]:
        """Without a trace: what it draws and prints has been drawn and printed."""
        devices = [] if self._state.device.is_host else [self._state.parameters[0][1].device]
        before = self._shared()
        try:
            with preserved_generators(), torch.random.fork_rng(devices), _unheard():
                yield
        except QuorateError as error:
            raise self._refused(f"fails: {error.message.rstrip('.')}") from None
        now = self._shared()
        if changed := next((name for name, value in now.items() if before.get(name, value) != value), None):
            raise self._refused(f"begins with another {changed}, which it changes from {before[changed]}")

    def _shared(self) -> dict[str, Any]:
        """Numbers and texts that all code of the module of `main` has in common."""
        names = type(self._first)._main.__globals__
        of_classes = ((f"{name}.", vars(each)) for name, each in names.items() if isinstance(each, type))
        found = {name: value for name, value in names.items() if isinstance(value, bool | int | float | str)}
        for prefix, values in of_classes:
            found |= {prefix + name: v for name, v in values.items() if isinstance(v, bool | int | float | str)}
        return found

    def _refused(self, what: str) -> UnsupportedModelError:
        named = f" These variables differ: {', '.join(self._differ[:8])}." if self._differ else ""
        return UnsupportedModelError(
            f"{type(self._first).__name__}() keeps something that counts where no checkpoint has it. In a worker that "
            f"joined after step {self._step}, as in a job that is resumed there, it {what}.{named} Keep it in "
            "run.state or in a buffer of the model, give schedulers to run.prepare(), count by result.step, use "
            "result.loss, and set nothing under run.is_main."
        )


def differing(one: FrameType | None, other: FrameType | None) -> list[str]:
    """The variables that two runs of the same code have with other values."""
    names: dict[str, None] = {}
    while one is not None and other is not None:
        if not one.f_globals.get("__name__", "").startswith("quorate."):
            values = other.f_locals
            pairs = ((name, value, values[name]) for name, value in one.f_locals.items() if name in values)
            names |= {name: None for name, value, found in pairs if _differ(value, found)}
        one, other = one.f_back, other.f_back
    return sorted(names)


def _differ(one: Any, other: Any, depth: int = 0) -> bool:
    if one is other or depth > _DEEPEST or isinstance(one, Run | torch.optim.Optimizer):
        return False
    if isinstance(one, torch.nn.Module) and isinstance(other, torch.nn.Module):
        one, other, depth = one.state_dict(), other.state_dict(), depth + 1
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape != other.shape or not torch.equal(one.detach(), other.detach())
    if isinstance(one, bool | int | float | str) or one is None or other is None:
        return type(one) is not type(other) or one != other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    elif type(one) is type(other) and not isinstance(one, Mapping):
        one, other = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    return one.keys() != other.keys() or any(_differ(one[key], other[key], depth + 1) for key in list(one)[:_MOST])


@contextmanager
def _unheard() -> Iterator[None]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
