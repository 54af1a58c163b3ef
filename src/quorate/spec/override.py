"""What is given for the keys of a job, in layers, the later over the earlier, and where each value was said."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.core.errors import Problem, RequestError
from quorate.spec.keys import PREFIX, Absent
from quorate.spec.migration import take_out
from quorate.spec.yaml_document import read_yaml

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
