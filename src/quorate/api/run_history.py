"""The numbers of a run as records, one for each step, by the names that they have in trackers."""

from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.observe.events import read_event
from quorate.storage.run_folder import RunFolder
from quorate.tracking.curves import TRAIN, VALIDATION, Curves

_TOLD = (f"{TRAIN}/", f"{VALIDATION}/")


def history_of(run: RunFolder) -> list[dict[str, float]]:
    """In the order of steps; a step that was redone is there once. Lines that are no events are passed over."""
    curves, records = Curves(), dict[int, dict[str, float]]()
    try:
        with opened_regular(run.events_file) as file:
            for line in file:
                try:
                    points = curves.points(read_event(line))
                except ValueError:
                    continue  # the last line of a run that is running, or was killed, may be half of one
                for point in points:
                    if point.name.startswith(_TOLD):
                        records.setdefault(point.step, {"step": point.step})[point.name] = point.value
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {run.events_file}: {error.strerror or error}") from error
    return [records[step] for step in sorted(records)]
