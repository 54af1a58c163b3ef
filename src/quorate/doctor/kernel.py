"""Features of the kernel by which processes are started, watched and ended."""

from collections.abc import Mapping

from quorate.doctor.finding import Finding, Level

NEEDED = {
    "fork": "workers are forked from a process that has imported torch",
    "pidfd": "the end of a worker is noticed by it",
    "parent-death signal": "workers end with their launcher by it",
}
USED = {"memfd": "workers of one host share memory by it"}
REMEDY = "Linux 5.3 or later has it; in a container, its seccomp profile must allow it."


def check_kernel(troubles: Mapping[str, str]) -> Finding:
    """What was tried, by name, and what went wrong with it: nothing where all is well."""
    failed = {name: trouble for name, trouble in troubles.items() if trouble}
    text = "; ".join(_told(name, trouble) for name, trouble in failed.items())
    if failed.keys() & NEEDED.keys():
        return Finding("kernel", Level.PROBLEM, text, REMEDY)
    if failed:
        return Finding("kernel", Level.WARNING, text, REMEDY)
    return Finding("kernel", Level.OK, f"{', '.join(troubles)} work")


def _told(name: str, trouble: str) -> str:
    return f"{name} does not work ({trouble}), and {(NEEDED | USED)[name]}"
