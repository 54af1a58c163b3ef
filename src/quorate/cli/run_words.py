"""How a run is put into words wherever it is shown."""

from quorate.history.run_record import RunRecord, Status

STATUS_STYLES = {
    Status.RUNNING: "cyan",
    Status.COMPLETE: "green",
    Status.INTERRUPTED: "yellow",
    Status.TERMINATED: "yellow",
    Status.LOST: "red",
    Status.FAILED: "red",
    Status.DAMAGED: "red",
}
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def ago(seconds: float) -> str:
    """How long ago something was, to one unit."""
    return f"{age(seconds)} ago" if seconds >= 1 else "just now"


def age(seconds: float) -> str:
    """A time span to one unit: 3 minutes, 1 day."""
    for length, unit in _UNITS:
        if seconds >= length:
            whole = int(seconds // length)
            return f"{whole} {unit}" if whole == 1 else f"{whole} {unit}s"
    return f"{int(seconds)} s"


def progress(record: RunRecord) -> str:
    """The steps done, and how many there are to be."""
    return f"{record.steps:,}" + ("" if record.total_steps is None else f"/{record.total_steps:,}")


def short_task(reference: str) -> str:
    """A task without the folder that its file is in."""
    place, colon, class_name = reference.rpartition(":")
    return f"{place.rpartition('/')[2]}{colon}{class_name}"
