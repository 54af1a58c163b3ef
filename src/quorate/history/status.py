"""How a run stands, from who holds its folder and what its result says."""

from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a run stands, the most pressing first."""

    RUNNING = "running"  # a launcher is at work on it
    FAILED = "failed"  # it ended with a failure
    LOST = "lost"  # nobody is at work on it and nobody has written how it ended: killed with its launcher
    DAMAGED = "damaged"  # its files cannot be read
    INTERRUPTED = "interrupted"  # stopped by Ctrl-C
    TERMINATED = "terminated"  # stopped by SIGTERM
    COMPLETE = "complete"


def decide_status(held: bool, result: dict[str, Any] | None, problems: tuple[str, ...]) -> tuple[Status, str]:
    """How a run stands, and why where that is not plain. `problems` are what cannot be read of its files."""
    if held:
        return Status.RUNNING, "; ".join(problems)
    if problems:
        return Status.DAMAGED, "; ".join(problems)
    if result is None:
        return Status.LOST, "it was killed together with its launcher, which could not write how it ended"
    said = result.get("status")
    if said in (Status.COMPLETE, Status.INTERRUPTED, Status.TERMINATED, Status.FAILED):
        return Status(said), ""
    return Status.DAMAGED, f"result.json says that it is {said!r}, which no run can be"
