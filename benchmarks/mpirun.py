"""How OpenMPI starts processes that talk through shared memory only."""

import re
import subprocess

PROGRAM = "mpirun"
_VERSION = re.compile(r"\b(\d+)\.\d+")


def shared_memory_layer(version: str) -> str:
    """What this release calls it: `vader` until 4, `sm` from 5 on."""
    found = _VERSION.search(version)
    return "vader" if found is not None and int(found[1]) < 5 else "sm"


def mpirun(processes: int, version: str) -> tuple[str, ...]:
    """The command before the interpreter. Like all others, its processes go where the kernel puts them."""
    return (
        PROGRAM,
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
        done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
