"""What is measured: Quorate in its variants, and its peers."""

from dataclasses import dataclass, field
from typing import Any

SETUP = "make bench-setup"
PIP = "pip install 'quorate[bench]'"
MPI = "apt install openmpi-bin"


@dataclass(frozen=True)
class Needs:
    """What has to be installed for a system: packages of the peers' interpreter, and a program."""

    packages: tuple[str, ...] = ()
    program: str = ""


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
    interpreter, if there is one.
    """

    system: System
    what: str
    order: dict[str, Any]
    prefix: tuple[str, ...] = ()

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
    """What the peers' interpreter has, package → version, the programs found, and the torch that Quorate uses."""

    packages: dict[str, str]
    programs: frozenset[str]
    torch: str


def absence_of(system: System, installed: Installed) -> Absence | None:
    """Why a system cannot be measured here; none if it can."""
    needs = system.needs
    if needs.program and needs.program not in installed.programs:
        return Absence(system.name, f"{needs.program} is not installed", MPI)
    missing = [package for package in needs.packages if package not in installed.packages]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return Absence(system.name, f"{' and '.join(missing)} {verb} not installed", f"{SETUP}, or {PIP}")
    theirs = installed.packages.get("torch", "")
    if "torch" in needs.packages and theirs != installed.torch:
        reason = f"its torch is {theirs} and Quorate's is {installed.torch}, which cannot be compared"
        return Absence(system.name, reason, SETUP)
    return None
