"""Events for whoever looks on while a job runs: they are shown, and never recorded."""

from enum import StrEnum

from quorate.observe.event import Event, event
from quorate.observe.quantities import plural, visible

LONGEST_LINE = 1000
"""Characters of a line that are shown; the log has all."""


class Prints(StrEnum):
    """Whose prints are shown: of all processes and lanes, of the first lane and its worker, or of none."""

    ALL = "all"
    FIRST = "first"
    NONE = "none"


@event(kind="")
class Printed(Event):
    """Lines that the task has printed or logged in a process of the job, in order; before them so many were `left_out`.

    `is_first`: in the first lane, beside the lanes of the worker that hosts it, or where the task is imported for all.
    """

    process: str
    lines: tuple[str, ...]
    is_first: bool = False
    left_out: int = 0


@event(kind="")
class Round(Event):
    """The supervisor has looked after the job once more, as it does some 20 times a second.

    `doing` is what a job is busy with that has not begun. After the last round every process has ended.
    """

    doing: str = ""
    is_last: bool = False


def printed_lines(event: Printed, prints: Prints) -> list[str]:
    """What is shown of it, each line marked with the process that has printed it."""
    if prints is Prints.NONE or (prints is Prints.FIRST and not event.is_first):
        return []
    lines = [f"[{event.process}] {_short(line)}" for line in event.lines]
    if event.left_out:
        lines.insert(0, f"[{event.process}] ({plural(event.left_out, 'line')} before this: see `quorate logs`)")
    return lines


def _short(line: str) -> str:
    cut = f"{line[:LONGEST_LINE]} … ({len(line):,} characters)" if len(line) > LONGEST_LINE else line
    return visible(cut)
