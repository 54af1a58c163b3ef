"""What acts on an update and is no tensor of the state: the settings of the optimizers, and what their schedules keep.

Settings are committed state. Only an update may change them; where user code does so while a lane or an evaluation
batch runs, the result would depend on which lanes a worker hosts. So they are watched there; workers compare a digest
of them at every step, and vouchers, copies and checkpoints have them, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.core.digests import content_digest
from quorate.core.errors import RunError, UnsupportedModelError

IN_TURN = 2
"""Values that an optimizer keeps of parameters, such as a momentum, that are watched at a time; then those that follow.
To ask torch for the version of one takes as long as to compare a group."""
LOOKED_UP = 64
"""Times until it is looked again where these are."""

LONGEST = 100
"""Letters of a value that a sentence shows; and elements of a tensor among the settings that are looked at."""

_Kept = tuple[str, dict[str, Any], str]
"""A value that an optimizer keeps of a parameter: the name of all of that one's, where they are, and its key there."""
Owners = list[tuple[str, Mapping[str, Any]]]
"""Who has settings, by name: groups of optimizers and schedules, as they are here or as they were saved."""

_OF_PARAMETERS = ("params", "param_names")
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_VERSION = attrgetter("_version")
_GONE = object()


class Settings:
    """Those of a task's optimizers, by name, with the schedules that it has for them."""

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Any]) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._watch = _Watch(optimizers, schedulers)
        self._keys: list[str] = []
        self._names: list[str] = []
        self._known: list[Any] = []
        self._texts: dict[str, str] = {}
        self._digest = ""

    # --- the record, which is equal in every worker

    def values(self) -> dict[str, str]:
        """Each as text, by a name for people."""
        self._look()
        return dict(self._texts)

    def digest(self) -> str:
        """Of all values. It is asked for at every step, and made again where one has changed."""
        self._look()
        self._digest = self._digest or _digest(self._texts)
        return self._digest

    def check_loaded(self, state: Mapping[str, Any], *, is_as_saved: bool) -> None:
        """A state was taken up: refuse settings that are not those of which it has the digest, if it has one.
        `is_as_saved`: the task gives no others now, so that they are in force."""
        if "settings" not in state:  # it was saved by an earlier version
            return
        groups = {name: of_one["param_groups"] for name, of_one in state["optimizers"].items()}
        saved, found = _values(_owners(groups, state["schedulers"])), self.values()
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

    # --- the watch

    def begin(self) -> None:
        """As they are now they are right, and are to stay so until the next update."""
        self._watch.take()

    def check(self, where: str) -> None:
        """Refuse what has changed since `begin`."""
        if not self._watch.is_unchanged() and (change := self._watch.change()):
            raise UnsupportedModelError(
                f"{change} in {where}. What the optimizer and its schedule keep is part of the state, which all lanes "
                "share: what is changed there would depend on which lanes a worker hosts. Change the learning rate by "
                "`schedule` in the job file or schedule() of the task, and anything else in the optimizer's step()."
            )


def state_of(scheduler: Any) -> dict[str, Any]:
    """What a schedule keeps. It may point at itself by a bound method it patched in; only plain values are state."""
    kept = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
    return {key: dict(value) if isinstance(value, Counter) else value for key, value in kept.items()}


def _owners(groups: Mapping[str, list[dict[str, Any]]], schedules: Mapping[str, Mapping[str, Any]]) -> Owners:
    owners: Owners = []
    for name, some in groups.items():
        owners += [(f"{_called('optimizer', name)}.param_groups[{number}]", group) for number, group in enumerate(some)]
    return owners + [(_called("schedule", name), state) for name, state in schedules.items()]


def _values(owners: Owners) -> dict[str, str]:
    named = ((owner, key, value) for owner, settings in owners for key, value in settings.items())
    return {f"{owner}[{key!r}]": _text(value) for owner, key, value in named if key not in _OF_PARAMETERS}


def _digest(values: Mapping[str, str]) -> str:
    return content_digest("\n".join(sorted([f"{name} = {text}" for name, text in values.items()])).encode())


def _text(value: Any) -> str:
    """The same in every process for what is the same; of something that is not plain, only what it is."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(inner)}' for key, inner in value.items()))}}}"
    if type(value) is torch.Tensor and value.numel() <= LONGEST:
        return f"{value.tolist()!r} ({value.dtype})"
    return "gone" if value is _GONE else f"a {type(value).__qualname__}"


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _called(what: str, name: str) -> str:
    return f"{what}[{name!r}]" if name else what


class _Watch:
    """The attributes of optimizers and schedules and the entries of groups: lists and dicts by what is in them, tensors
    by their versions, and everything by identity first. Of what optimizers keep of parameters some, in turn."""

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Any]) -> None:
        self._optimizers = list(optimizers.values())
        objects = [(_called("optimizer", name), vars(each)) for name, each in optimizers.items()]
        for name, each in schedulers.items():
            objects += _attributes(_called("schedule", name), each)
        self._called = [name for name, _ in objects]
        self._attributes = [attributes for _, attributes in objects]
        self._saved: list[dict[str, Any]] = []
        self._of_groups: list[torch.Tensor] = []
        self._kept: list[_Kept] = []
        self._in_turn: list[_Kept] = []
        self._sizes: list[int] = []
        self._expected: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._takes = 0

    def take(self) -> None:
        owners = self._owners()
        if not _are_equal(owners, self._saved):
            before = self._saved if len(self._saved) == len(owners) else [{}] * len(owners)
            pairs = zip(owners, before, strict=True)
            self._saved = [old if _are_equal(new, old) else _copied(new) for new, old in pairs]
            self._of_groups = [one for owner in owners for one in owner.values() if type(one) is torch.Tensor]
        sizes = [len(each.state) for each in self._optimizers]
        if sizes != self._sizes or self._takes % LOOKED_UP == 0:
            self._sizes, self._kept = sizes, list(self._all_kept())
        first = self._takes * IN_TURN % max(IN_TURN, len(self._kept))
        self._takes += 1
        self._in_turn = self._kept[first : first + IN_TURN]
        kept = [of_one.get(key) for _, of_one, key in self._in_turn]
        self._expected = self._saved + sizes + kept
        self._tensors = self._of_groups + [one for one in kept if type(one) is torch.Tensor]
        self._versions = list(map(_VERSION, self._tensors))

    def is_unchanged(self) -> bool:
        now: list[Any] = self._owners()
        now += [len(each.state) for each in self._optimizers]
        now += [of_one.get(key) for _, of_one, key in self._in_turn]
        return _are_equal(now, self._expected) and list(map(_VERSION, self._tensors)) == self._versions

    def change(self) -> str | None:
        """What has changed first, in words; None where all is what it was."""
        names = [f"{name}.{{}}" for name in self._called]
        for name, each in zip(self._called, self._optimizers, strict=False):
            names += [f"{name}.param_groups[{number}][{{!r}}]" for number in range(len(each.param_groups))]
        versions = zip(self._tensors, self._versions, strict=True)
        written = {id(one) for one, version in versions if one._version != version}
        owners, optimizers = list(zip(names, self._owners(), self._saved, strict=False)), len(self._optimizers)
        # Schedules first, whose step changes a group; to an optimizer its groups are one list.
        for name, now, saved in owners[optimizers:] + owners[:optimizers]:
            for key in {**saved, **now}:
                old, new = saved.get(key, _GONE), now.get(key, _GONE)
                if id(new) in written:
                    return f"{name.format(key)} was changed to {_text(new)}"
                if new is not old and not _are_equal(new, old):
                    return f"{name.format(key)} was changed from {_shown(old)} to {_shown(new)}"
        for (name, of_one, key), old in zip(self._in_turn, self._expected[-len(self._in_turn) :], strict=False):
            if of_one.get(key) is not old or id(old) in written:
                return f"{name}[{key!r}] was changed"
        count = sum(1 for _ in self._all_kept())  # to look for an entry makes an empty one
        if count == len(self._kept):
            return None
        return f"What the optimizer keeps was changed from {len(self._kept)} to {count} values"

    def _owners(self) -> list[dict[str, Any]]:
        owners = self._attributes.copy()
        for each in self._optimizers:
            owners += each.param_groups
        return owners

    def _all_kept(self) -> Iterator[_Kept]:
        for name, optimizer in zip(self._called, self._optimizers, strict=False):
            for number, of_one in enumerate(optimizer.state.values()):
                if isinstance(of_one, dict):
                    yield from ((f"{name}.state[{number}]", of_one, key) for key in of_one)


def _attributes(name: str, scheduler: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a schedule, and of those that it is made of."""
    if hasattr(scheduler, "__dict__"):
        yield name, vars(scheduler)
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _attributes(f"{name}._schedulers[{number}]", part)


def _copied(owner: dict[str, Any]) -> dict[str, Any]:
    """Lists and dicts in it are copied, too: they may change and stay the same objects."""
    return {k: v.copy() if type(v) is list or type(v) is dict else v for k, v in owner.items()}


def _are_equal(now: Any, saved: Any) -> bool:
    """Whether nothing has changed. Python compares identities first, in a fraction of the time of any loop."""
    try:
        return bool(now == saved)
    except Exception:  # a tensor or an array was replaced, and has many truths; or something of the user's own
        return False
