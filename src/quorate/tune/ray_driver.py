"""What Ray Tune tells of the trials of a search, passed on to its driver."""

from typing import Any

from ray import tune

from quorate.core.errors import JobError
from quorate.tune.driver import DEATHS, Driver
from quorate.tune.ray_schedulers import Explained
from quorate.tune.ray_trial import report_of


class RayDriver(tune.Callback, tune.Stopper):  # type: ignore[misc] # Ray has no types here
    """Hears Tune, and ends its experiment when the driver ends the search."""

    def __init__(self, driver: Driver, scheduler: Explained) -> None:
        self._driver = driver
        self._scheduler = scheduler
        self._trials: list[Any] = []

    def on_trial_start(self, trial: Any, **_: Any) -> None:
        self._driver.began(trial.config["trial"], trial.config.get("branches", 0))

    def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
        report = report_of(result)
        if not report.ending:
            # Whichever actor goes on with it need not tell this again.
            trial.config["after"] = report.step
        stopped = self._scheduler.reasons.get(trial.trial_id, "")
        self._driver.told(trial.config["trial"], report, node=result.get("hostname", ""), stopped=stopped)

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        """Of those that a scheduler stops while they are paused, nothing else is heard."""
        if reason := self._scheduler.reasons.get(trial.trial_id):
            step = trial.config.get("after", 0)
            self._driver.journal.tell("stopped", trial.config["trial"], step=step, reason=reason)

    def on_trial_recover(self, trial: Any, **_: Any) -> None:
        driver, number = self._driver, trial.config["trial"]
        if why := driver.died(number):
            trial.config["failed"] = why
        if driver.deaths[number] > DEATHS and driver.refusal is None:  # not even that can be told
            driver.refusal = JobError(f"trials cannot be started: {_last_line(trial.get_error())}")
            driver.end(driver.refusal.message)

    def on_trial_error(self, trial: Any, **_: Any) -> None:
        message = str(trial.error_file or "Ray Tune gave it up")
        self._driver.journal.tell("failed", trial.config["trial"], message=message)

    def on_step_end(self, trials: list[Any], **_: Any) -> None:
        self._trials = trials
        self._driver.turn()

    def stop_all(self) -> bool:
        """When all that were under way have stopped in order, those that wait are dropped as well."""
        return bool(self._driver.reason) and not any(trial.status == "RUNNING" for trial in self._trials)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes down what it is given, and this is never read back


def _last_line(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else "Ray says no more"
