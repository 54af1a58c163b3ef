"""Jobs of earlier versions, read as jobs of this one: which keys have other names now, and which are gone.

A version that renames keys is a row of `_RENAMED`; which keys are gone their options say. Whatever reads a job
reads it through here: job files, `--set`, variables, Python, old runs with their checkpoints, and the spaces of
searches.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from quorate.core.errors import Problem
from quorate.spec.options import removed_keys
from quorate.spec.section import VERSION

Value = TypeVar("Value")

_RENAMED: dict[int, dict[str, str]] = {1: {"on_poison": "on_nonfinite_loss"}}
"""By version: keys of the job, and their names in the next version."""
NAMES = {old: new for version in sorted(_RENAMED) for old, new in _RENAMED[version].items()}
_FIRST_NAMES = {new: old for old, new in NAMES.items()}


def migrate(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job of any version with the names of this one.

    What is gone is left out where it has the value that it had by default, as in every job in a run folder.
    A job without a version may use the old names too. One of a version that nobody knows is left as it is: the check of
    its keys says so.
    """
    migrated: dict[str, Any] = dict(job)
    for key, removed in removed_keys().items():
        if take_out(trial := dict(migrated), key) == removed.default:
            migrated = trial
    if "version" not in job:
        return renamed(migrated)
    return renamed(migrated) | {"version": VERSION} if _is_earlier(job["version"]) else migrated


def without_removed(job: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A recorded job without the keys that are gone; and what to do instead of each, where it said something."""
    left: dict[str, Any] = dict(job)
    told = {}
    for key, removed in removed_keys().items():
        if take_out(left, key) not in (_MISSING, removed.default):
            told[key] = removed.instead
            if removed.with_it:
                take_out(left, removed.with_it)
    return left, told


def take_out(section: dict[str, Any], key: str) -> Any:
    """Take the value of a dotted key out; the sections on the way are copied."""
    head, _, inner = key.partition(".")
    if not inner:
        return section.pop(head, _MISSING)
    if not isinstance(section.get(head), Mapping):
        return _MISSING
    section[head] = dict(section[head])
    return take_out(section[head], inner)


_MISSING = object()


def _is_earlier(version: Any) -> bool:
    # Python holds True for equal to 1.
    return type(version) is int and version in _RENAMED


def present_name(key: str) -> str:
    """The name that a dotted key has in this version."""
    head, dot, inner = key.partition(".")
    return f"{NAMES.get(head, head)}{dot}{inner}"


def first_name(key: str) -> str:
    """The name that a dotted key had in version 1: digests of jobs are made with it, so that they stay equal."""
    head, dot, inner = key.partition(".")
    return f"{_FIRST_NAMES.get(head, head)}{dot}{inner}"


def renamed(keys: Mapping[str, Value]) -> dict[str, Value]:
    """By present names."""
    # A key that is not text, which Python lets pass, is refused later, with the others.
    return {present_name(key) if isinstance(key, str) else key: value for key, value in keys.items()}


def mixed_names(job: Mapping[str, Any], origin: Callable[[str], str]) -> Iterator[Problem]:
    """Keys of two versions in one job: nobody can know which is meant. `origin` says where a key was written."""
    version = job.get("version")
    for new in (new for new in _FIRST_NAMES if new in job):
        old = _FIRST_NAMES[new]
        if _is_earlier(version):
            said = f"the job is of version {version} ({origin('version')})"
            text = f"it is a key of version {VERSION} ({origin(new)}), and {said}"
            yield Problem(new, text, f"Write version: {VERSION}.", ("version",))
        elif version is None and old in job:
            yield Problem(old, f"it is now called {new}, which is given too ({origin(new)})", f"Keep {new}.", (new,))


def advice_on_names(job: Mapping[str, Any], source: str, origin: Callable[[str], str]) -> str:
    """What to write instead of names of earlier versions; nothing where all is of this version."""
    version = job.get("version")
    instead = [f"{NAMES[key]} instead of {key} ({origin(key)})" for key in job if key in NAMES]
    if version is None and instead:
        return f"{source} uses old names of keys. Write {' and '.join(instead)}."
    if not _is_earlier(version):
        return ""
    instead = [f"version: {VERSION} ({origin('version')})", *instead]
    return f"{source} is of version {version}, and is read as version {VERSION}. Write {' and '.join(instead)}."
