"""From a search to its end: trials on Ray or on this machine, and what is left of them where an earlier part was
killed."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.core.errors import RunError
from quorate.history.search_record import SearchRecord
from quorate.spec.search import HyperbandSpec, PbtSpec, SearchSpec
from quorate.spec.search_load import ResolvedSearch
from quorate.storage.search_folder import SearchFolder
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.tune.driver import COMPLETE, Driver
from quorate.tune.journal import Journal, Listener
from quorate.tune.local_search import on_this_machine
from quorate.tune.mlflow_parent import MlflowParent
from quorate.tune.proposal import needs_optuna, refuse_missing_library
from quorate.tune.trial_source import TrialSource

Train = Callable[[Driver, dict[str, Any]], None]
"""Has the trials trained that the driver's source gives, with the keys of a job that say where and how they run."""


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
        # Of Ray's in brackets and in populations trials wait for each other: all are told anew, from what they have
        # recorded.
        replays = search.spec.runs_on_ray and isinstance(search.spec.scheduler, HyperbandSpec | PbtSpec)
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
        elif needs_optuna(spec):
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
