"""From a search to its end: trials on Ray or on this machine, and what is left of them where an earlier part was
killed."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.api.run_part import refuse_missing_libraries
from quorate.core.errors import RunError
from quorate.core.masking import register_secrets
from quorate.history.run_record import Status
from quorate.history.search_record import SearchRecord
from quorate.spec.job import job_secrets
from quorate.spec.search import PbtSpec, SearchSpec
from quorate.spec.search_load import ResolvedSearch
from quorate.storage.run_notes import place, tracking_uri
from quorate.storage.search_folder import SearchFolder
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.tracking import mlflow_client
from quorate.tune.driver import COMPLETE, Driver
from quorate.tune.local_search import on_this_machine
from quorate.tune.proposal import needs_optuna, refuse_missing_library
from quorate.tune.trial_source import Journal, Listener, TrialSource

Train = Callable[[Driver, dict[str, Any]], None]
"""Has the trials trained that the driver's source gives, with the keys of a job that say where and how they run."""


class MlflowParent:
    """The MLflow run of a search, below which its trials have theirs. `uri` is None where the job is not tracked by
    MLflow; trouble with MLflow never ends a search."""

    def __init__(self, search: ResolvedSearch, folder: SearchFolder) -> None:
        track = search.job.spec.track
        refuse_missing_libraries(track)
        # The trials are not in the folder of runs: what `mlflow: true` means is said before they begin.
        self.uri = tracking_uri(track, folder.path.parent) if track and track.mlflow else None
        self._search = search
        self._folder = folder
        self._client: Any = None
        self._run_id = ""
        register_secrets(job_secrets(search.job.spec))
        self._try(self._begin)

    def end(self, record: SearchRecord) -> None:
        """Write down what was found; one that is resumed later is under way again then."""
        self._try(lambda: self._end(record))

    def _begin(self) -> None:
        self._client = mlflow_client.connect(str(self.uri))
        spec = self._search.spec
        trials, experiment = self._folder.trials, mlflow_client.experiment_of(self._search.job.spec)
        found = mlflow_client.find_or_make_parent(self._client, str(self.uri), trials, self._folder.name, experiment)
        self._run_id = found
        self._client.update_run(self._run_id, status="RUNNING")
        for key, value in {
            "algorithm": spec.algorithm.kind,
            "scheduler": spec.scheduler.kind,
            "seed": spec.seed,
        }.items():
            self._client.set_tag(self._run_id, f"quorate.{key}", str(value))

    def _end(self, record: SearchRecord) -> None:
        if not self._run_id:
            return
        best = record.best
        if best is not None:
            for watched, value in zip(record.objectives, best.values, strict=True):
                self._client.log_metric(self._run_id, f"best/{watched.metric}", value, step=len(record.trials))
            for key, value in best.params.items():
                self._client.set_tag(self._run_id, f"best.{key}", str(value))
            self._client.set_tag(self._run_id, "best.trial", best.run)
        for file in (self._folder.best_job_file, self._folder.report_page, self._folder.report_text):
            if file.is_file():
                self._client.log_artifact(self._run_id, str(file))
        self._client.set_terminated(self._run_id, "FINISHED" if record.status is Status.COMPLETE else "KILLED")

    def _try(self, act: Callable[[], None]) -> None:
        if self.uri is None:
            return
        try:
            act()
        except Exception as error:  # of MLflow, a server or a database
            log.warning("MLflow at %s does not get the search: %s", place(self.uri), error)


def run_search(
    search: ResolvedSearch, folder: SearchFolder, listener: Listener | None, tick: Callable[[], None]
) -> MlflowParent:
    """Run a search, or what is left of it; why it has ended is in its log. Returns who is to be told what it has found.

    The listener hears each line of the log, and `tick` is called several times a second.
    """
    # From here on a signal only asks for the end: Ray, which takes seconds to start, would be left behind half-started.
    with listening_to_signals() as signals, folder.lock():
        refuse_missing_library(search.spec)
        journal = Journal(folder, listener)
        _share(folder, search.spec.storage)
        parent = MlflowParent(search, folder)
        manner = {"name": "trial", "runs": str(folder.trials.resolve())}
        if parent.uri is not None:
            manner["track.mlflow"] = parent.uri
        try:
            # Again within: Ray takes SIGTERM for itself when it is connected.
            with _engine(search, folder) as train, listening_to_signals():
                _run(search, journal, manner, signals, tick, train)
        except BaseException:
            parent.end(SearchRecord.read(folder, with_runs=False))
            raise
        return parent


def _engine(search: ResolvedSearch, folder: SearchFolder) -> contextlib.AbstractContextManager[Train]:
    if not search.spec.runs_on_ray:
        return on_this_machine(search)
    from quorate.tune.ray_search import on_ray

    return on_ray(search, folder)


def _run(
    search: ResolvedSearch,
    journal: Journal,
    manner: dict[str, Any],
    signals: Signals,
    tick: Callable[[], None],
    train: Train,
) -> None:
    journal.tell("search-began" if journal.log.began is None else "search-resumed", reason=search.source)
    reason = "it failed"
    try:
        # In populations trials wait for each other: all are told anew, from what they have recorded.
        replays = isinstance(search.spec.scheduler, PbtSpec)
        driver = Driver(search, journal, TrialSource(search.spec, journal, replays), signals, tick)
        if not signals.reason:
            train(driver, manner)
        reason = driver.reason or signals.reason or COMPLETE
    finally:
        journal.tell("search-ended", reason=reason)
    if driver.refusal is not None:
        raise driver.refusal


def import_engine(spec: SearchSpec) -> None:
    """What a search imports itself, ahead of its need. What is missing is told when nothing else is wrong with it."""
    with contextlib.suppress(ImportError):
        if spec.runs_on_ray:
            from quorate.tune.ray_search import import_ray

            import_ray()
        if needs_optuna(spec):
            import optuna  # noqa: F401


def _share(folder: SearchFolder, storage: str | None) -> None:
    """Have the runs of the trials in a folder that all nodes reach."""
    if storage is None or folder.trials.is_symlink():
        return
    shared = Path(storage) / folder.name / "trials"
    try:
        shared.mkdir(parents=True, exist_ok=True)
        if any(shared.iterdir()):
            # Its runs would pass for the trials of this search.
            raise RunError(f"storage: {shared} has the trials of another search. Use another name or storage.")
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt was killed here
            folder.trials.rmdir()
        folder.trials.symlink_to(shared, target_is_directory=True)
    except OSError as error:
        raise RunError(f"storage: {shared} cannot be used ({error.strerror or error}).") from error


log = logging.getLogger(__name__)
