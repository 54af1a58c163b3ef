"""What is given for the keys of a job, in layers, the later over the earlier, and where each value was said; by the
names of this version, whichever it was written for."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quorate.core.errors import Problem, RequestError
from quorate.spec.keys import PREFIX, VERSION, Absent
from quorate.spec.options import removed_keys
from quorate.spec.yaml_document import read_yaml

Value = TypeVar("Value")

# --- jobs of earlier versions: which keys have other names now, and which are gone
#
# A version that renames keys is a row of `_RENAMED`; which keys are gone their options say. Whatever reads a job reads
# it through here: job files, `--set`, variables, Python, old runs with their checkpoints, the spaces of searches.

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


# --- layers

ENVIRONMENT = "environment "
DEFAULT = "default"
_LENGTHS = {"epochs", "steps"}
_KEY_PLACES = {"checkpoint.encrypt.key_env", "checkpoint.encrypt.key_file"}
_OF_KINDS = {"strategy", "engine"}
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True)
class Override:
    """A dotted key, its value as Python holds it, and where it was said: ``--workers``, ``--set checkpoint.every``."""

    key: str
    value: Any
    origin: str

    @property
    def layer(self) -> str:
        """Who says it, for a sentence: the command line, the environment, or a call such as ``Job.replace``."""
        if self.origin.startswith("--"):
            return "the command line"
        return "the environment" if self.origin.startswith(ENVIRONMENT) else self.origin


def parse_set(text: str) -> Override:
    """The override in ``a.b=c``; the value is read as in a job file."""
    key, equals, value = (part.strip() for part in text.partition("="))
    example = "Write key=value, such as --set checkpoint.every=50."
    if not equals or not _KEY.fullmatch(key):
        raise RequestError(f"--set {text!r} is not of the form key=value. {example}")
    if not value:
        raise RequestError(f"--set {text!r} gives {key} no value. {example} To unset a key, write {key}=null.")
    document = read_yaml(value)
    if document.problems:
        raise RequestError(f"--set {key}: the value {value!r} cannot be read: {document.problems[0].text}. {example}")
    return Override(key, document.value, f"--set {key}")


def parse_sets(texts: Iterable[str]) -> list[Override]:
    """All of these; what is wrong in several of them is told at once."""
    overrides, wrong = [], []
    for text in texts:
        try:
            overrides.append(parse_set(text))
        except RequestError as error:
            wrong.append(error)
    if len(wrong) > 1:
        raise RequestError(f"{len(wrong)} settings cannot be read:" + "".join(f"\n  {error}" for error in wrong))
    if wrong:
        raise wrong[0]
    return overrides


def variable_name(key: str) -> str:
    """The environment variable of a key: ``checkpoint.every`` is ``QUORATE_CHECKPOINT__EVERY``."""
    return PREFIX + key.replace(".", "__").upper()


def environment_overrides(environment: Mapping[str, str]) -> tuple[Sequence[Override], Sequence[Problem]]:
    """What the ``QUORATE_`` variables say, in the order of their names, and what in them cannot be read."""
    overrides, problems = [], []
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        origin, text = f"{ENVIRONMENT}{name}", environment[name]
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        document = read_yaml(text)
        if not _KEY.fullmatch(key):
            problems.append(
                Problem(origin, "no key can be meant by this name", "An example: QUORATE_CHECKPOINT__EVERY.")
            )
        elif document.problems:
            problems.append(Problem(origin, f"the value {text!r} cannot be read: {document.problems[0].text}"))
        else:
            overrides.append(Override(key, document.value, origin))
    return overrides, problems


def is_asked(key: str, environment: Mapping[str, str], overrides: Iterable[Override]) -> bool:
    """Whether a person says a key now, and not only a job that was recorded."""
    return variable_name(key) in environment or any(override.key == key for override in overrides)


@dataclass(frozen=True)
class Layers:
    """What has been given so far, and where; keys are dotted in `origins` and nested in `values`."""

    values: dict[str, Any]
    origins: dict[str, str]

    def under(self, overrides: Iterable[Override]) -> "Layers":
        """These values with one more layer over them. Its steps replace epochs of the layers below, and the reverse; so
        do the file and the variable of a key."""
        overrides = list(overrides)
        values, origins = plain_copy(self.values), dict(self.origins)
        said = {override.key for override in overrides if override.value is not None}
        for alternatives in (_LENGTHS, _KEY_PLACES):
            if said & alternatives:
                for key in alternatives:
                    take_out(values, key)
                    origins.pop(key, None)
        for override in overrides:
            *parents, last = override.key.split(".")
            section = values
            for parent in parents:
                # What is no mapping has no inner keys, so setting one replaces it, such as a null section. The text of
                # a strategy or of an engine is its kind, which stays.
                if not isinstance(given := section.get(parent), dict):
                    section[parent] = {"kind": given} if parent in _OF_KINDS and isinstance(given, str) else {}
                section = section[parent]
            if last == "kind" and section.get(last, override.value) != override.value:
                section.clear()  # what another kind was given is nothing to this one
            section[last] = plain_copy(override.value)
            inner = f"{override.key}."
            origins = {key: origin for key, origin in origins.items() if not key.startswith(inner)}
            origins[override.key] = override.origin
        return Layers(values, origins)

    def origin(self, path: str) -> str:
        """Where a given key was written: at its own place, or inside the value of a key above it."""
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path, DEFAULT)

    def said(self, key: str) -> str:
        """The same, to stand behind a value."""
        origin = self.origin(key)
        return " (the default)" if origin == DEFAULT else origin and f" ({origin})"

    def origins_of(self, resolved: Mapping[str, Any]) -> dict[str, str]:
        """The origin of every single value of a resolved job."""
        return dict(self._origins(resolved, self.values, ""))

    def _origins(self, resolved: Mapping[str, Any], given: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in resolved.items():
            path = f"{prefix}{key}"
            # Inside a given scalar (strategy: ring) everything is given by that scalar.
            inner = given.get(key, Absent.NOT_GIVEN) if isinstance(given, Mapping) else given
            if isinstance(value, Mapping) and value:
                yield from self._origins(value, {} if inner is Absent.NOT_GIVEN else inner, f"{path}.")
            else:
                yield path, DEFAULT if inner is Absent.NOT_GIVEN else self.origin(path)


def plain_copy(value: Any) -> Any:
    """The value with tuples as lists, sharing nothing with the original, which its owner may change later."""
    if isinstance(value, Mapping):
        return {key: plain_copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(inner) for inner in value]
    return value
