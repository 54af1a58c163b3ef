"""What a training loop of one's own changes between two steps, and keeps: it is part of the state, as an update is.

And what it has in variables, which is not: of these it is seen whether they differ in another run of the same code.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from types import FrameType
from typing import Any

import numpy
import torch

from quorate.core.errors import UnsupportedModelError
from quorate.core.user_code import given
from quorate.data.sampler import Sampler
from quorate.own_loop.run import Place, Run, Turns
from quorate.replica.state_watch import GONE, Owner, StateWatch, is_torchs
from quorate.spec.job import RingSpec
from quorate.task.progress import Progress
from quorate.task.task import loss_in

_DEEPEST, _MOST = 3, 1000
"""So far, and so many values, two variables are compared, to tell which differ."""


@dataclass(frozen=True)
class Kept:
    """What checkpoints have of `main` besides tensors and settings: the epoch that it is in, run.state as JSON, what it
    has made of attributes and modes of modules, and whether that epoch is one that it is yet to begin."""

    epoch: int | None = None
    state: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    modes: Mapping[str, bool] = field(default_factory=dict)
    is_ahead: bool = False

    def text(self) -> str:
        return json.dumps([self.epoch, self.state, self.attributes, self.modes, self.is_ahead])

    @classmethod
    def of(cls, progress: Progress, sampler: Sampler) -> "Kept":
        found = json.loads(progress.kept) if progress.kept else {}
        # Of an earlier version it is run.state alone, and what comes after an epoch was done before the next step.
        epoch = max(0, progress.cursor.step - 1) // sampler.steps_per_epoch
        return cls(*found) if isinstance(found, list) else cls(epoch, progress.kept)


class OwnState:
    """The state that `main` may change in its turns between two steps, as a worker has it in a generation."""

    def __init__(self, name: str, turns: Turns, watch: StateWatch, sampler: Sampler) -> None:
        self._name, self._turns, self.watch = name, turns, watch
        self._is_ring = isinstance(sampler.spec.strategy, RingSpec)
        self._sizes = self._group_sizes()
        self._changed = Kept()
        self._made_of: tuple[Any, ...] = ()
        self.text = ""

    def begin(self) -> None:
        """What `main` has done before its first batch makes the initial state."""
        self._use_plain_numbers()
        self._adopt(f"{self._name}() before its first batch")

    def restore(self, kept: Kept, text: str) -> None:
        """Have what a state has, whatever `main` has made of it on its way there."""
        self._turns.restored = kept.state
        self._turns.take_up_state()
        assigned, replica = self.watch.assigned, self.watch.replica
        named = [(name.rpartition("."), value) for name, value in kept.attributes.items()]
        for owner in assigned.owners:
            owner.saved.clear()
            owner.saved.update(owner.built | {name: value for (path, _, name), value in named if path == owner.path})
            owner.put_back()
        assigned.put_back_hooks()
        assigned.take()
        replica.restore_modes(kept.modes)
        replica.buffers.restore()
        self._changed = replace(kept, epoch=None, state="", is_ahead=False)
        self.text = text
        self.watch.replica.optimizers.settings.note(text)

    @contextmanager
    def same_weights(self) -> Iterator[None]:
        """A turn of `main`, after which the parameters are as they were."""
        replica = self.watch.replica
        versions = replica.versions()
        yield
        if replica.versions() != versions:
            pairs = zip(replica.parameters, versions, strict=True)
            name = next(name for (name, each), version in pairs if each._version != version)
            raise UnsupportedModelError(
                f"{self._name}() has changed '{name}' itself, as optimizer.step() does. run.step(loss) does all of "
                "backward(), the optimizer's step, zero_grad() and the scheduler's step; initial weights are set "
                "before run.prepare(), and a second set of weights, such as a teacher's, is kept in buffers."
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A turn of `main`, which all workers have alike: what it changes is the state from then on, and what cannot be
        is refused."""
        settings = self.watch.replica.optimizers.settings
        before = "" if self._is_ring else settings.digest()
        with self.same_weights():
            yield
        if self._group_sizes() != self._sizes:
            raise UnsupportedModelError(
                f"{self._name}() has given the optimizer other parameters between two steps. Give it all of them "
                "before run.prepare(), in a group whose lr is 0 until they are to be trained."
            )
        self._use_plain_numbers()
        self._adopt(f"{self._name}() between two steps")
        if not self._is_ring and (self._turns.state or self._changed != Kept() or settings.digest() != before):
            raise UnsupportedModelError(
                f"{self._name}() changes run.state, modules or the optimizer's settings between two steps, which is "
                "kept with `strategy: ring` only; servers know nothing of it."
            )

    def kept_in(self, progress: Progress) -> Progress:
        """The progress with what `main` keeps now."""
        turns = self._turns
        made_of = self._changed, turns.epoch, turns.kept_state(), turns.place is Place.EPOCHS
        if self._is_ring and made_of != self._made_of:
            changed, epoch, state, is_ahead = self._made_of = made_of
            self.text = replace(changed, epoch=epoch, state=state, is_ahead=is_ahead).text()
            self.watch.replica.optimizers.settings.note(self.text)
        return progress if self.text == progress.kept else progress.keeping(self.text)

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer, _ in self.watch.settings.watched for group in optimizer.param_groups)

    def _group_sizes(self) -> list[int]:
        """How many parameters each group has, which is fixed when the job starts."""
        return [len(group["params"]) for group in self._groups()]

    def _use_plain_numbers(self) -> None:
        """A number of NumPy, which no checkpoint holds, becomes one of Python."""
        for group in self._groups():
            group.update({key: value.item() for key, value in group.items() if isinstance(value, numpy.generic)})

    def _adopt(self, where: str) -> None:
        """What `main` has changed is the state from now on. Refuse what no checkpoint holds."""
        assigned, replica = self.watch.assigned, self.watch.replica
        replica.check_trainable()
        self.watch.check(where)
        has_assigned = not assigned.is_as_saved()
        if has_assigned:
            if hooks := assigned.put_back_hooks():
                raise UnsupportedModelError(f"{hooks[0]} were changed in {where}. Register hooks before run.prepare().")
            for owner in assigned.owners:
                _adopt_attributes(owner, where)
            assigned.take()
        if replica.adopt() or has_assigned:
            changed = {
                f"{owner.path}.{name}": value
                for owner in assigned.owners
                for name, value in owner.saved.items()
                if value is not owner.built.get(name, GONE)
            }
            self._changed = Kept(None, "", changed, replica.changed_modes())


def _adopt_attributes(owner: Owner, where: str) -> None:
    """Take a number or a text that was assigned for what is right; put back what is only torch's own."""
    now = {name: value for name, value in owner.attributes.items() if name not in owner.others}
    for name in {**owner.saved, **now}:
        value = now.get(name, GONE)
        if value is owner.saved.get(name, GONE) or is_torchs(owner.owner, name):
            continue
        if isinstance(value, numpy.generic):
            value = value.item()
        if value is not None and type(value) not in (bool, int, float, str):
            raise UnsupportedModelError(
                f"'{owner.path}.{name}' was changed in {where}, to {given(value)}. Between two steps an attribute of a "
                "module may become another number, text, True, False or None, which are saved with the run. Make a "
                "tensor a buffer of the model, and keep lists in run.state."
            )
        owner.saved[name] = value
    owner.put_back()


def warning_of(name: str, lost: Sequence[str], measure: Any) -> str:
    """What to say of variables with tensors of which no checkpoint knows. Refuses those that `measure` reads: metrics
    decide which checkpoint is the best, and when training ends."""
    said = (
        f"{name}() keeps tensors that change in training in {', '.join(lost)}, where no checkpoint has them: a worker "
        "that joins, or a job that is resumed, begins again with what they were at the top"
    )
    advice = "Keep them in buffers of the model; the key `average` keeps an exponential average of the weights."
    code = getattr(inspect.unwrap(measure), "__code__", None) if measure is not None else None
    if code is not None and (read := [each for each in lost if each in (*code.co_freevars, *code.co_names)]):
        raise UnsupportedModelError(f"{said}, and run.evaluate() measures with {', '.join(read)}. {advice}")
    return f"{said}. What is computed or written with them is another one then. {advice}"


def variables(one: FrameType | None, other: FrameType | None) -> Iterator[tuple[str, Any, Any]]:
    """Those that two runs of the same code have, with both values."""
    for values, others in zip(_locals(one), _locals(other), strict=False):
        yield from ((name, value, others[name]) for name, value in values.items() if name in others)


def lives_on(one: Any, other: Any, own: Set[int]) -> bool:
    """Whether a variable that differs has tensors which are carried from step to step, as an average of weights is: a
    batch has another shape than what its variable was first, and one number, such as a sum of losses, is for looking
    at."""
    now, first = (
        [leaf.shape for leaf in _leaves(each, own).values() if isinstance(leaf, torch.Tensor)] for each in (one, other)
    )
    if isinstance(one, torch.Tensor):
        return now == first and one.numel() > 1
    return bool(now) and (now == first or not first)


def differ(one: Any, other: Any, own: Set[int]) -> bool:
    """Whether two variables have other numbers, texts or tensors in them; `own` are the parts of models."""
    if one is other:
        return False
    ones, others = _leaves(one, own), _leaves(other, own)
    return ones.keys() != others.keys() or not all(map(_is_same, ones.values(), others.values()))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.detach(), other.detach())
    return type(one) is type(other) and bool(one == other)


def _leaves(value: Any, own: Set[int]) -> dict[tuple[Any, ...], Any]:
    """The numbers, texts and tensors in a value, by their places in it, but for those of a model."""
    return dict(islice(_inside(value, own, ()), _MOST))


def _inside(value: Any, own: Set[int], place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if id(value) in own or len(place) > _DEEPEST or isinstance(value, Run | torch.optim.Optimizer):
        return
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        yield place, value
        return
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        value = {name: each for name, each in getattr(value, "__dict__", {}).items() if name[:1] != "_"}
    for key, each in value.items():
        if isinstance(key, str | int):
            yield from _inside(each, own, (*place, key))


def numbers_of(loss: Any, trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A loss, or several, and their gradients."""
    losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    numbers = [each[0] if isinstance(each, tuple) and each else loss_in(each) for each in losses]
    numbers = [each for each in numbers if isinstance(each, torch.Tensor)]  # others are refused where they are read
    found = [each.detach().clone() for each in numbers]
    for each in (each for each in numbers if each.requires_grad):
        with suppress(RuntimeError):  # such as of a graph that is used up, which the lane itself finds
            gradients = torch.autograd.grad(each.sum(), trained, retain_graph=True, allow_unused=True)
            pairs = zip(trained, gradients, strict=True)
            found += [torch.zeros_like(p) if one is None else one.detach().to_dense() for p, one in pairs]
    return found


def same_numbers(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all are equal to the last bit, but for −0.0, and a NaN equals itself."""
    if [(one.shape, one.dtype) for one in ones] != [(other.shape, other.dtype) for other in others]:
        return False
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in zip(ones, others, strict=True))


def marked_locals(frame: FrameType | None) -> dict[str, Any]:
    """The variables of `main`, and of functions that it has called, with marks by which a change is seen."""
    return {name: (id(value), _mark(value)) for values in _locals(frame) for name, value in values.items()}


def _locals(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The variables of the user's code, from where it waits outwards."""
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("quorate."):
            yield frame.f_locals
        frame = frame.f_back


def _mark(value: Any) -> Any:
    """By which a value that is the same object is seen to have changed."""
    return value._version if isinstance(value, torch.Tensor) else len(value) if isinstance(value, Sized) else None
