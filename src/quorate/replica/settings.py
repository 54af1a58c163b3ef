"""What acts on an update and is no tensor of the state: the settings of the optimizers, and what their schedules keep.

Settings are committed state. Only an update may change them; where user code does so while a lane or an evaluation
batch runs, the result would depend on which lanes a worker hosts. So they are watched there; workers compare a digest
of them at every step, and vouchers, copies and checkpoints have them, too.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from quorate.core.digests import content_digest
from quorate.core.errors import RunError, UnsupportedModelError

IN_TURN = 2
"""Values that an optimizer keeps of parameters, such as a momentum, that are watched at a time; then those that follow.
To ask torch for the version of one takes as long as to compare a group."""
LOOKED_UP = 64
"""Times until it is looked again where these are."""
LONGEST = 100
"""Letters of a value that a sentence shows; and elements of a tensor among the settings that it shows."""

Owners = list[tuple[str, Mapping[str, Any]]]
"""Who has settings, by name: groups of optimizers and schedules, as they are here or as they were saved."""

_OF_PARAMETERS = ("params", "param_names")
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_LISTED = (*_OF_PARAMETERS, "param_groups")
"""What is in these lists is watched by itself."""
_VERSION = attrgetter("_version")
_GONE = object()

NOTED = "what main() keeps"


class Settings:
    """Those of a task's optimizers, by name, with the schedules that it has for them."""

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Any]) -> None:
        seen: set[int] = set()
        parts = dict(
            part
            for what, owners in (("optimizer", optimizers), ("schedule", schedulers))
            for name, each in owners.items()
            for part in _parts(_called(what, name), each, seen)
        )
        self._optimizers = {name: each for name, each in parts.items() if isinstance(each, Optimizer)}
        self._schedulers = schedulers
        rest = {name: each for name, each in parts.items() if name not in self._optimizers}
        self.watch = SettingsWatch(self._optimizers, rest)
        self._keys: list[str] = []
        self._names: list[str] = []
        self._known: list[Any] = []
        self._texts: dict[str, str] = {}
        self._digest = ""
        self._noted, self._noted_digest = "", ""

    def values(self) -> dict[str, str]:
        """Each as text, by a name for people."""
        self._look()
        return self._texts | ({NOTED: self._noted} if self._noted else {})

    def digest(self) -> str:
        """Of all values. It is asked for at every step, and made again where one has changed."""
        self._look()
        self._digest = self._digest or _digest(self._texts)
        return self._digest + self._noted_digest

    def note(self, text: str) -> None:
        """What else all workers have to have alike, in steps and vouchers: what a loop of one's own keeps."""
        if text != self._noted:
            self._noted, self._noted_digest = text, content_digest(text.encode())

    def check_loaded(self, state: Mapping[str, Any], *, is_as_saved: bool) -> None:
        """A state was taken up: refuse settings that are not those of which it has the digest, if it has one.
        `is_as_saved`: the task gives no others now, so that they are in force."""
        if "settings" not in state:  # it was saved by an earlier version
            return
        saved, found = _saved(state), self.values()
        if _digest(saved) != state["settings"]:
            raise RunError(
                f"the settings of the optimizer are not those that were saved: their digest is {_digest(saved)}, and "
                f"was {state['settings']}. Go on from another checkpoint, or train from the beginning."
            )
        # Another version of torch may have more of them.
        different = next((name for name, text in saved.items() if found.get(name) != text), None)
        if is_as_saved and different is not None:
            raise RunError(
                f"{different} was saved as {saved[different]}, and is {found.get(different, 'gone')} after it was "
                "loaded: the job would go on with other settings of the optimizer. Let load_state_dict() of the "
                "optimizer and of the schedule take up all that state_dict() gives."
            )

    def _look(self) -> None:
        owners = [group for each in self._optimizers.values() for group in each.param_groups]
        owners += map(state_of, self._schedulers.values())
        keys, now = list(chain.from_iterable(owners)), [value for owner in owners for value in owner.values()]
        if keys != self._keys:
            groups = {name: each.param_groups for name, each in self._optimizers.items()}
            named = _owners(groups, dict(zip(self._schedulers, owners[-len(self._schedulers) :], strict=False)))
            self._names = [f"{owner}[{key!r}]" for owner, settings in named for key in settings]
            self._keys, self._known, self._texts, self._digest = keys, [_GONE] * len(keys), {}, ""
        for number, (new, old) in enumerate(zip(now, self._known, strict=True)):
            # What is not plain may be the same object, and changed.
            if (new is not old or type(new) not in _PLAIN) and keys[number] not in _OF_PARAMETERS:
                text = _text(new)
                if self._texts.get(self._names[number]) != text:
                    self._texts[self._names[number]], self._digest = text, ""
        self._known = now


def state_of(scheduler: Any) -> dict[str, Any]:
    """What a schedule keeps. It may point at itself by a bound method it patched in; only plain values are state."""
    kept: dict[str, Any] = _storable(scheduler.state_dict())
    return kept


def _storable(value: Any) -> Any:
    """Counters are dicts then; a schedule that is made of others has those of them, too."""
    if isinstance(value, dict):
        return {key: _storable(inner) for key, inner in value.items() if not callable(inner)}
    return [_storable(inner) for inner in value] if type(value) is list else value


def digest_of_saved(state: Mapping[str, Any]) -> str:
    """Of the settings that a state has, which are not those of an optimizer within another where it does not tell."""
    return _digest(_saved(state))


def _saved(state: Mapping[str, Any]) -> dict[str, str]:
    groups = {_called("optimizer", name): of_one["param_groups"] for name, of_one in state["optimizers"].items()}
    owners = _owners(groups, state["schedulers"])
    named = ((owner, key, value) for owner, settings in owners for key, value in settings.items())
    return {f"{owner}[{key!r}]": _text(value) for owner, key, value in named if key not in _OF_PARAMETERS}


def _owners(groups: Mapping[str, list[dict[str, Any]]], schedules: Mapping[str, Mapping[str, Any]]) -> Owners:
    owners: Owners = []
    for name, some in groups.items():
        owners += [(f"{name}.param_groups[{number}]", group) for number, group in enumerate(some)]
    return owners + [(_called("schedule", name), state) for name, state in schedules.items()]


def _digest(values: Mapping[str, str]) -> str:
    return content_digest("\n".join(sorted([f"{name} = {text}" for name, text in values.items()])).encode())


def _text(value: Any) -> str:
    """The same in every process for what is the same; of something that is not plain, only what it is."""
    if type(value) in _PLAIN or isinstance(value, numpy.generic):
        return repr(value.item() if isinstance(value, numpy.generic) else value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(inner)}' for key, inner in value.items()))}}}"
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        if value.numel() <= LONGEST:
            return f"{value.tolist()!r} ({value.dtype})"
        content = value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return f"a tensor of {list(value.shape)} ({value.dtype}) with the digest {content_digest(content)}"
    return "gone" if value is _GONE else f"a {type(value).__qualname__}"


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _called(what: str, name: str) -> str:
    return f"{what}[{name!r}]" if name else what


class SettingsWatch:
    """The attributes of optimizers and schedules and the entries of groups: lists and dicts by what is in them, tensors
    by their versions, and everything by identity first. Of what optimizers keep of parameters some, in turn."""

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Any]) -> None:
        self.optimizers = list(optimizers.values())
        self._called = [*optimizers, *schedulers]
        self._attributes = [vars(each) for each in (*self.optimizers, *schedulers.values())]
        self._watched: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self._inner: list[list[torch.Tensor]] = []
        # What optimizers keep: the name of all that they keep of a parameter, where that is, and a key there.
        self._all_kept: list[tuple[str, dict[str, Any], str]] = []
        self._in_turn: list[tuple[str, dict[str, Any], str]] = []
        self._kept: list[Any] = []
        self._takes = 0
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []

    @property
    def watched(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """All optimizers, also those within others, each with its attributes as they were when this began."""
        return list(zip(self.optimizers, self.saved, strict=False))

    def begin(self) -> None:
        """As they are now they are right, and are to stay so until the next update."""
        owners = self._watched = [*self._attributes, *chain.from_iterable([e.param_groups for e in self.optimizers])]
        if len(owners) != len(self.saved):
            self.saved, self._inner = [{} for _ in owners], [[] for _ in owners]
        changed = [] if _are_equal(owners, self.saved) else zip(owners, self.saved, strict=True)
        for number, (owner, saved) in enumerate(changed):
            # Only those that differ: a rate changes at every step, and to copy hooks and defaults takes longer.
            if not _are_equal(owner, saved):
                self._inner[number] = []
                self.saved[number] = _copied(owner, self._inner[number])
        sizes = [len(each.state) for each in self.optimizers]
        if self._takes % LOOKED_UP == 0 or sizes != self._kept[: len(sizes)]:
            self._all_kept = list(self._look_up())
        first = self._takes * IN_TURN % max(IN_TURN, len(self._all_kept))
        self._takes += 1
        self._in_turn = self._all_kept[first : first + IN_TURN]
        self._kept = [*sizes, *[of_one.get(key) for _, of_one, key in self._in_turn]]
        self._tensors = [one for one in self._kept if isinstance(one, torch.Tensor)]
        self._tensors += chain.from_iterable(self._inner)
        self._versions = list(map(_VERSION, self._tensors))

    def check(self, where: str) -> None:
        """Refuse what has changed since `begin`."""
        kept: list[Any] = [len(each.state) for each in self.optimizers]
        kept += [of_one.get(key) for _, of_one, key in self._in_turn]
        now = list(map(_VERSION, self._tensors)), kept, self._watched  # a group that is new is among the attributes
        if not _are_equal(now, (self._versions, self._kept, self.saved)) and (change := self.change()):
            raise UnsupportedModelError(
                f"{change} in {where}. What the optimizer and its schedule keep is part of the state, which all lanes "
                "share: what is changed there would depend on which lanes a worker hosts. Change the learning rate by "
                "`schedule` in the job file or schedule() of the task, and other settings there or in the step() of an "
                "optimizer of your own, which is where parameters are updated: on servers, if the strategy has them."
            )

    def change(self) -> str | None:
        """What has changed first, in words; None where all is what it was."""
        now = [*self._attributes, *chain.from_iterable([each.param_groups for each in self.optimizers])]
        names = [f"{name}.{{}}" for name in self._called]
        for name, each in zip(self._called, self.optimizers, strict=False):
            names += [f"{name}.param_groups[{number}][{{!r}}]" for number in range(len(each.param_groups))]
        versions = zip(self._tensors, self._versions, strict=True)
        written = {id(one) for one, version in versions if one._version != version}
        owners, optimizers = list(zip(names, now, self.saved, strict=False)), len(self.optimizers)
        # Schedules first, whose step changes a group; to an optimizer its groups are one list.
        for name, now, saved in owners[optimizers:] + owners[:optimizers]:
            for key in {**saved, **now}:
                old, new = saved.get(key, _GONE), now.get(key, _GONE)
                inner: list[torch.Tensor] = []
                _copied({key: new}, inner)
                if not written.isdisjoint(map(id, inner)):
                    return f"{name.format(key)} was changed to {_text(new)}"
                if new is not old and not _are_equal(new, old):
                    return f"{name.format(key)} was changed from {_shown(old)} to {_shown(new)}"
        for (name, of_one, key), old in zip(self._in_turn, self._kept[optimizers:], strict=True):
            if of_one.get(key) is not old or id(old) in written:
                return f"{name}[{key!r}] was changed"
        count = sum(1 for _ in self._look_up())  # to look for an entry makes an empty one
        if count == len(self._all_kept):
            return None
        return f"What the optimizer keeps was changed from {len(self._all_kept)} to {count} values"

    def _look_up(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for name, optimizer in zip(self._called, self.optimizers, strict=False):
            for number, of_one in enumerate(optimizer.state.values()):
                if isinstance(of_one, dict):
                    yield from ((f"{name}.state[{number}]", of_one, key) for key in of_one)


def _parts(name: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """An optimizer or a schedule, and those that it is made of: one that wraps another, or has several in a row."""
    if id(owner) in seen or not hasattr(owner, "__dict__"):
        return
    seen.add(id(owner))
    yield name, owner
    for key, value in vars(owner).items():
        several = enumerate(value) if isinstance(value, list | tuple) else ()
        for called, each in ((f"{name}.{key}", value), *((f"{name}.{key}[{n}]", each) for n, each in several)):
            if isinstance(each, Optimizer | LRScheduler):
                yield from _parts(called, each, seen)


def _copied(owner: Mapping[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Lists and dicts in it are copied, too: they may change and stay the same objects. `tensors` gets those in it."""
    return {
        key: value
        if type(value) in _PLAIN or key == "state"
        else list(value)
        if key in _LISTED and isinstance(value, list)
        else _copy(value, tensors)
        for key, value in owner.items()
    }


def _copy(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, dict):
        return {key: _copy(inner, tensors) for key, inner in value.items()}
    elif isinstance(value, list):
        return [_copy(inner, tensors) for inner in value]
    elif isinstance(value, tuple):
        copied = tuple([_copy(inner, tensors) for inner in value])
        return value if all(map(is_, copied, value)) else copied  # the same is compared in no time
    elif isinstance(value, set | deque):
        return value.copy()
    return value


def _are_equal(now: Any, saved: Any) -> bool:
    """Whether nothing has changed. Python compares identities first, in a fraction of the time of any loop."""
    try:
        return bool(now == saved)
    except Exception:  # a tensor or an array was replaced, and has many truths; or something of the user's own
        return False
