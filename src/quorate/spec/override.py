"""One value that a later layer puts in the place of the job file's: a flag, a ``--set``, a variable."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.core.errors import Problem, RequestError
from quorate.spec.yaml_document import read_yaml

PREFIX = "QUORATE_"
ENVIRONMENT = "environment "
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
