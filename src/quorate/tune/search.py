"""`quorate.Search` and `quorate.tune`: a search in Python, and how it is run, resumed and shown."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quorate.api import session
from quorate.api.job import Job, job_text
from quorate.api.tracker import catch_up_on_ended
from quorate.api.train import pass_on_signal
from quorate.core.errors import RequestError
from quorate.core.runs_folder import runs_folder
from quorate.core.user_code import given
from quorate.spec.override import Override
from quorate.spec.search_load import (
    ResolvedSearch,
    dump_search,
    load_recorded_search,
    resolve_search,
)
from quorate.storage.run_folder import RunFolder, refuse_untrusted, why_untrusted
from quorate.storage.search_folder import SearchFolder
from quorate.tune.journal import Listener
from quorate.tune.proposal import open_search, with_task
from quorate.tune.result import SearchResult, conclude
from quorate.tune.run_search import run_search


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
        self.resolved: ResolvedSearch = with_task(resolve_search(mapping, "Search(...)", os.environ, resolved))

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "Search":
        """Read a search file. `overrides` (dotted keys, such as ``"budget.trials"``) override its keys."""
        layer = [Override(key, value, "Search.from_file") for key, value in (overrides or {}).items()]
        search = cls.__new__(cls)
        search.resolved = open_search(Path(path), os.environ, layer)
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
    parent.end(result.record)
    # A trial that ended just when a driver was killed is not trained again, and has nobody else who tells of it.
    with contextlib.suppress(KeyboardInterrupt):  # which ends the wait for trackers, and not a search that has ended
        catch_up_on_ended(RunFolder.all_in(folder.trials))
    return result


def tune(search: Search) -> SearchResult:
    """Run a search to its end and return its result."""
    if not isinstance(search, Search):
        raise RequestError(f"quorate.tune takes a quorate.Search and was given {given(search)}.")
    return _concluded(run(search.resolved, begin(search.resolved)))


def resume_search(search: str | Path, *, runs: str | Path | None = None) -> SearchResult:
    """Resume a search that was stopped or killed: a name, a unique prefix of one, a path, or ``"last"``."""
    return _concluded(run(*recorded(runs_folder(runs), str(search))))


def _concluded(result: SearchResult) -> SearchResult:
    pass_on_signal(result.exit_code, f"the search {result.search} was {result.status}")
    return result
