"""Which Python has the peers, what is installed in it, what this process may do, and how OpenMPI is started."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.system import Installed, System
from quorate.core.errors import RequestError
from quorate.core.processes import find_program

ENVIRONMENT_OF_PEERS = ".venv-bench"
PATIENCE = 60.0

# Asked by metadata: importing Lightning to learn its version takes ten seconds.
_QUESTION = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for package in sys.argv[1:]:
    try:
        found[package] = version(package)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Those that a benchmark may need, by their number. Root has them, but often not in a container."""
MPIRUN = "mpirun"
_VERSION = re.compile(r"\b(\d+)\.\d+")


@dataclass(frozen=True)
class Interpreters:
    """Quorate's own Python, and the one that has the peers: often the same."""

    own: str
    peers: str

    @classmethod
    def find(cls, given: Path | None) -> "Interpreters":
        """The peers' is the given one, or that of `.venv-bench` beside Quorate's own environment, or Quorate's."""
        if given is not None and not shutil.which(given):
            raise RequestError(
                f"--peers: {given} is not a program. Give the Python that has the peers, such as "
                f"{ENVIRONMENT_OF_PEERS}/bin/python, or leave it out."
            )
        beside = Path(sys.prefix).parent / ENVIRONMENT_OF_PEERS / "bin" / "python"
        found = given or (beside if beside.exists() else Path(sys.executable))
        return cls(sys.executable, str(found.absolute() if found.parent != Path() else found))

    def of(self, system: System) -> str:
        """Whoever needs no package of the peers runs with Quorate's own."""
        return self.peers if system.needs.packages else self.own

    def look(self, systems: list[System]) -> Installed:
        """What is there of all that the systems need."""
        packages = sorted({package for system in systems for package in system.needs.packages})
        programs = {program for system in systems for program in system.needs.programs}
        return Installed(
            packages=self._packages(packages),
            programs=frozenset(program for program in programs if find_tool(program)),
            torch=installed_version("torch"),
            rights=effective_rights(),
        )

    def _packages(self, names: list[str]) -> dict[str, str]:
        if not names:
            return {}
        try:
            done = subprocess.run(
                [self.peers, "-c", _QUESTION, *names], capture_output=True, text=True, check=True, timeout=PATIENCE
            )
            found: dict[str, str] = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise RequestError(
                f"--peers: {self.peers} is not a Python that can be asked for packages: {error}"
            ) from None
        return found


def find_tool(name: str) -> str | None:
    """The path of a program of the system, or of one that a package has put beside Quorate's own Python."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or find_program(name)


def installed_version(package: str) -> str:
    """The version of a package that Quorate itself would import."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def effective_rights() -> frozenset[str]:
    """Those that this process has."""
    return rights_in(Path("/proc/self/status").read_text())


def rights_in(status: str) -> frozenset[str]:
    """Those that the kernel's page about a process tells."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return frozenset(right for right, number in RIGHTS.items() if int(value, 16) >> number & 1)
    return frozenset()


def shared_memory_layer(version: str) -> str:
    """What this release calls it: `vader` until 4, `sm` from 5 on."""
    found = _VERSION.search(version)
    return "vader" if found is not None and int(found[1]) < 5 else "sm"


def mpirun(processes: int, version: str) -> tuple[str, ...]:
    """The command before the interpreter. Like all others, its processes go where the kernel puts them."""
    return (
        MPIRUN,
        "-n",
        str(processes),
        "--oversubscribe",
        "--allow-run-as-root",
        "--bind-to",
        "none",
        "--mca",
        "pml",
        "ob1",
        "--mca",
        "btl",
        f"self,{shared_memory_layer(version)}",
    )


def mpirun_version() -> str:
    """What it says of itself; empty where it is not installed."""
    try:
        done = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
