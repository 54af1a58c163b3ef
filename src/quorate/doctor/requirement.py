"""What the package asks for: its own metadata, read without a library for it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BOUND = re.compile(r"(==|>=)\s*([^\s,;)]+)")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)[\"']")


@dataclass(frozen=True)
class Requirement:
    """A package, the version it has to have (`==`) or to reach (`>=`), and the extra that needs it, if one does."""

    package: str
    relation: str = ""
    version: str = ""
    extra: str = ""

    def accepts(self, version: str) -> bool:
        """Whether an installed version will do."""
        if not self.relation:
            return True
        given, asked = _release(version), _release(self.version)
        return given >= asked if self.relation == ">=" else given == asked

    def __str__(self) -> str:
        return f"{self.package}{self.relation}{self.version}"


def read_requirements(lines: Iterable[str]) -> list[Requirement]:
    """The requirements in a package's metadata, such as ``scikit-learn>=1.6; extra == "examples"``."""
    requirements = []
    for line in lines:
        specifier, _, marker = line.partition(";")
        name, bound, extra = _NAME.match(specifier.strip()), _BOUND.search(specifier), _EXTRA.search(marker)
        if name:
            relation, version = bound.groups() if bound else ("", "")
            requirements.append(Requirement(name[0], relation, version, extra[1] if extra else ""))
    return requirements


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers, without zeros at their end: 2.13.0+cpu is (2, 13), and so is 2.13."""
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
