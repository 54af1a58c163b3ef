"""What the driver of a search writes down, and knows from earlier parts of the search."""

from collections.abc import Callable
from typing import Any

from quorate.history.search_log import ENDED, LoggedTrial, SearchLog
from quorate.storage.search_folder import SearchFolder

Listener = Callable[[dict[str, Any]], None]


class Journal:
    """Writes decisions to the log of a search, and has read it. What is known is not written again: a trial that is
    resumed tells once more what it has told before."""

    def __init__(self, folder: SearchFolder, listener: Listener | None = None) -> None:
        self.folder = folder
        self.log = SearchLog.read(folder.log_file)
        self._listener = listener

    @property
    def trials(self) -> dict[int, LoggedTrial]:
        return self.log.trials

    @property
    def steps(self) -> int:
        """Steps of all trials together, as far as they were told."""
        return sum(trial.now.step for trial in self.trials.values())

    def tell(self, kind: str, trial: int | None = None, **fields: Any) -> None:
        """Write a line, unless it is known."""
        if trial is not None and trial in self.trials and _is_known(self.trials[trial], kind, fields.get("step")):
            return
        line = self.folder.tell(kind, trial, **fields)
        self.log.take(line)
        if self._listener is not None:
            self._listener(line)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes down what it is given, with all that hangs on it, and this is never read back


def reports_of(trial: LoggedTrial) -> dict[int, dict[str, Any]]:
    """All evaluations of a trial, by step."""
    return {step: metrics for part in trial.parts for step, metrics in part.reports.items()}


def _is_known(trial: LoggedTrial, kind: str, step: int | None) -> bool:
    if kind == "proposed" or trial.status in ENDED:
        return True
    if kind == "exploited":
        return any(part.donor is not None and part.from_step == step for part in trial.parts)
    return kind == "reported" and step in reports_of(trial)
