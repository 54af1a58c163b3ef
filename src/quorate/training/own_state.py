"""What a training loop of one's own changes between two steps, and keeps: it is part of the state, as an update is."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from quorate.core.errors import UnsupportedModelError
from quorate.core.user_code import given
from quorate.data.sampler import Sampler
from quorate.spec.job import RingSpec
from quorate.training.own_run import Place, Turns
from quorate.training.progress import Progress
from quorate.training.state_watch import GONE, Owner, StateWatch, is_torchs


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
        self.watch.settings.note(text)

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
        settings = self.watch.settings
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
            self.watch.settings.note(self.text)
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
