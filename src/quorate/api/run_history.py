"""The numbers of a run as records, one for each step, by the names that they have in trackers."""

from typing import Any

from quorate.core.errors import RequestError, RunError
from quorate.core.regular_file import opened_regular
from quorate.observe.events import read_event
from quorate.storage.run_folder import RunFolder


class History(list[dict[str, float]]):
    """A mapping for each step, by the names that numbers have in trackers."""

    def to_dataframe(self) -> Any:
        """A row for each step, as pandas has it; NaN where a step has no such number."""
        pandas = pandas_here()
        return pandas.DataFrame(self).set_index("step") if self else pandas.DataFrame()


def pandas_here() -> Any:
    """The library pandas, for whoever asks for a table; nothing else needs it."""
    try:
        import pandas
    except ImportError:
        raise RequestError(
            "to_dataframe needs the library pandas, which is not installed: pip install pandas"
        ) from None
    return pandas


def history_of(run: RunFolder) -> History:
    """In the order of steps; a step that was redone is there once. Lines that are no events are passed over."""
    # Here, and not above: whoever trains and does not look back needs no trackers.
    from quorate.tracking.curves import TRAIN, VALIDATION, Curves

    shown = (f"{TRAIN}/", f"{VALIDATION}/")
    curves, records = Curves(), dict[int, dict[str, float]]()
    try:
        with opened_regular(run.events_file) as file:
            for line in file:
                try:
                    points = curves.points(read_event(line))
                except ValueError:
                    continue  # the last line of a run that is running, or was killed, may be half of one
                for point in points:
                    if point.name.startswith(shown):
                        records.setdefault(point.step, {"step": point.step})[point.name] = point.value
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise RunError(f"cannot read {run.events_file}: {error.strerror or error}") from error
    return History(records[step] for step in sorted(records))
