"""Python, the packages that are needed, and the extras that may be."""

from collections.abc import Mapping, Sequence

from quorate.doctor.finding import Finding, Level
from quorate.doctor.requirement import Requirement

SHOWN = 3


def check_system(system: str, release: str, machine: str) -> Finding:
    """Workers are watched by pidfd and forked, which only Linux does as it is needed."""
    text = f"{system} {release}, {machine}"
    if system == "Linux":
        return Finding("system", Level.OK, text)
    return Finding("system", Level.PROBLEM, f"{text}; jobs run on Linux only", "Run it in a Linux container.")


def check_python(version: str, needed: Requirement) -> Finding:
    """Python itself."""
    if needed.accepts(version):
        return Finding("python", Level.OK, version)
    text = f"{version} is too old: {needed.version} or later is needed"
    return Finding("python", Level.PROBLEM, text, f"Make a new environment with Python {needed.version} or later.")


def check_packages(needed: Sequence[Requirement], installed: Mapping[str, str]) -> Finding:
    """Everything that Quorate cannot do without."""
    lacking = [requirement for requirement in needed if not _is_there(requirement, installed)]
    if not lacking:
        return Finding("packages", Level.OK, f"all {len(needed)} that are needed are installed")
    text = ", ".join(_as_it_is(requirement, installed) for requirement in lacking)
    quoted = " ".join(f"'{requirement}'" for requirement in lacking)
    return Finding("packages", Level.PROBLEM, text, f"pip install {quoted}")


def check_extra(extra: str, needed: Sequence[Requirement], installed: Mapping[str, str]) -> Finding:
    """Packages that only some need."""
    lacking = [requirement for requirement in needed if not _is_there(requirement, installed)]
    name = f"extra {extra}"
    if not lacking:
        return Finding(name, Level.OK, _listed([f"{each.package} {installed[each.package]}" for each in needed]))
    text = _listed([_as_it_is(requirement, installed) for requirement in lacking])
    return Finding(name, Level.NOTE, text, f"If you want it: pip install 'quorate[{extra}]'")


def _is_there(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    return requirement.package in installed and requirement.accepts(installed[requirement.package])


def _as_it_is(requirement: Requirement, installed: Mapping[str, str]) -> str:
    version = installed.get(requirement.package)
    if version is None:
        return f"{requirement.package} is not installed"
    return f"{requirement.package} is {version}, not {requirement.relation}{requirement.version}"


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
