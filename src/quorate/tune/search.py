"""`quorate.Search` and `quorate.tune`: a search in Python, how it is run and resumed, and what it leaves behind."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorate.api import session
from quorate.api.job import Job, job_text
from quorate.api.run_part import refuse_missing_libraries
from quorate.api.tracker import catch_up_on_ended
from quorate.api.train import pass_on_signal
from quorate.core.errors import RequestError, RunError
from quorate.core.masking import register_secrets
from quorate.core.user_code import given
from quorate.history.run_record import Status
from quorate.spec.job import job_secrets
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder, refuse_untrusted, why_untrusted
from quorate.storage.run_notes import place, tracking_uri
from quorate.supervisor.signals import listening_to_signals
from quorate.tracking import mlflow_client
from quorate.tune.driver import COMPLETE, Driver, TrialSource
from quorate.tune.folder import SearchFolder
from quorate.tune.loading import (
    ResolvedSearch,
    dump_search,
    load_recorded_search,
    read_mapping,
    read_search,
)
from quorate.tune.local_search import on_this_machine
from quorate.tune.proposal import needs_optuna, refuse_missing_library, with_task
from quorate.tune.result import SearchResult
from quorate.tune.spec import PbtSpec, SearchSpec
from quorate.tune.trials import Journal, Listener


def conclude(folder: SearchFolder) -> SearchResult:
    """Write what a search ends with into its folder, and say how it stands."""
    # Only here: it draws with numpy, which takes long to import.
    from quorate.tune.report import write_search_files

    result = SearchResult.read(folder)
    write_search_files(result, datetime.now(UTC))
    return result


class Search:
    """A hyperparameter search, which `quorate.tune` runs.

    ::

        search = quorate.Search(
            job=quorate.Job(task=Digits, batch_size=64, epochs=3),
            metric="accuracy",
            space={"params.learning_rate": {"loguniform": [1e-4, 1e-1]}},
            budget={"trials": 10},
        )
        result = quorate.tune(search)

    The keys are those of the search file and are checked in the same way. `job` is a `quorate.Job`, the path of a job
    file, or a mapping. Without a `space`, one is proposed from the task's params; it is in `resolved.spec.space`.
    """

    def __init__(self, job: Any, **keys: Any) -> None:
        resolved = job.resolved if isinstance(job, Job) else None
        mapping = keys if resolved else {"job": job, **keys}
        self.resolved: ResolvedSearch = with_task(read_mapping(mapping, "Search(...)", os.environ, resolved))

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "Search":
        """Read a search file. `overrides` (dotted keys, such as ``"budget.trials"``) override its keys."""
        layer = [Override(key, value, "Search.from_file") for key, value in (overrides or {}).items()]
        search = cls.__new__(cls)
        search.resolved = with_task(read_search(Path(path), os.environ, layer))
        return search

    def __repr__(self) -> str:
        spec = self.resolved.spec
        return f"<Search {spec.name}: {', '.join(spec.metrics)} over {', '.join(spec.space or {})}>"


def begin(search: ResolvedSearch) -> SearchFolder:
    """Make the folder of a search."""
    runs = Path(search.spec.runs).absolute()
    job = search.job.spec
    return SearchFolder.create(
        runs,
        search.spec.name,
        dump_search(search),
        job_text(search.job),
        is_private=session.is_private(job),
        is_shared=job.share is not None,
    )


def recorded(runs: Path, reference: str) -> tuple[ResolvedSearch, SearchFolder]:
    """A search that was started before."""
    folder = SearchFolder(SearchFolder.find(runs, reference).path.absolute())
    why = why_untrusted(runs, reference, folder.path)
    refuse_untrusted(why, folder.path, "what its job names is not used", remedy="")
    return load_recorded_search(folder.path), folder


def run(
    search: ResolvedSearch,
    folder: SearchFolder,
    listener: Listener | None = None,
    tick: Callable[[], None] = lambda: None,
) -> SearchResult:
    """Run a search to its end in its folder, which then has its best job and its report."""
    parent = run_search(search, folder, listener, tick)
    result = conclude(folder)
    parent.end(result)
    # A trial that ended just when a driver was killed is not trained again, and has nobody else who tells of it.
    with contextlib.suppress(KeyboardInterrupt):  # which ends the wait for trackers, and not a search that has ended
        catch_up_on_ended(RunFolder.all_in(folder.trials))
    return result


def tune(search: Search) -> SearchResult:
    """Run a search to its end and return its result."""
    if not isinstance(search, Search):
        raise RequestError(f"quorate.tune takes a quorate.Search and was given {given(search)}.")
    result = run(search.resolved, begin(search.resolved))
    pass_on_signal(result.exit_code, f"the search {result.search} was {result.status}")
    return result


# --- from a search to its end: trials on Ray or on this machine


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

    def end(self, result: SearchResult) -> None:
        """Write down what was found; one that is resumed later is under way again then."""
        self._try(lambda: self._end(result))

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

    def _end(self, result: SearchResult) -> None:
        if not self._run_id:
            return
        best = result.best
        if best is not None:
            for watched, value in zip(result.objectives, best.values, strict=True):
                self._client.log_metric(self._run_id, f"best/{watched.metric}", value, step=len(result.trials))
            for key, value in best.params.items():
                self._client.set_tag(self._run_id, f"best.{key}", str(value))
            self._client.set_tag(self._run_id, "best.trial", best.run_name)
        for file in (self._folder.best_job_file, self._folder.report_page, self._folder.report_text):
            if file.is_file():
                self._client.log_artifact(self._run_id, str(file))
        self._client.set_terminated(self._run_id, "FINISHED" if result.status is Status.COMPLETE else "KILLED")

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
        on_engine = on_this_machine
        if search.spec.runs_on_ray:
            from quorate.tune.ray_search import on_ray as on_engine
        try:
            # Again within: Ray takes SIGTERM for itself when it is connected.
            with on_engine(search, folder) as train, listening_to_signals():
                journal.tell("search-began" if journal.began is None else "search-resumed", reason=search.source)
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
        except BaseException:
            parent.end(SearchResult.read(folder, with_runs=False))
            raise
        return parent


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
