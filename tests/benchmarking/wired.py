"""Cables between network namespaces, for tests: whether they can be made here, and who holds one."""

from pathlib import Path

import pytest

from benchmarks.cable import DEVICE
from benchmarks.interpreters import Interpreters
from benchmarks.overlap import OVERLAP
from benchmarks.system import absence_of

_absence = absence_of(OVERLAP, Interpreters("", "").look([OVERLAP]))

needs_cables = pytest.mark.skipif(
    _absence is not None, reason="" if _absence is None else f"{_absence.reason}: {_absence.command}"
)


def namespace() -> str:
    """That of this process: net:[4026531840]."""
    return _read(Path("/proc/self/ns/net"))


def holders(namespaces: set[str]) -> list[str]:
    """All that keeps one of these namespaces: processes in it, descriptors of it, and mounts."""
    found = [str(link) for link in Path("/proc").glob("[0-9]*/ns/net") if _read(link) in namespaces]
    found += [str(link) for link in Path("/proc").glob("[0-9]*/fd/*") if _read(link) in namespaces]
    mounts = Path("/proc/self/mountinfo").read_text()
    return found + [name for name in namespaces if name in mounts]


def on_a_cable(folder: Path) -> set[str]:
    """The namespaces, with a cable in them, of processes that work in or below a folder."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            works_there = process.joinpath("cwd").readlink().is_relative_to(folder)
            if works_there and f"{DEVICE}:" in process.joinpath("net", "dev").read_text():
                found.add(str(process.joinpath("ns", "net").readlink()))
        except OSError:
            continue  # it has ended meanwhile
    return found


def _read(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
