"""The folder of a hyperparameter search: what it holds, how it is made and locked, and which one a person means.

It stands among the runs, and is none: `trials` inside it is a folder of runs of its own.
"""

import contextlib
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quorate.core.errors import RunError
from quorate.core.regular_file import open_regular, opened_regular
from quorate.core.runs_folder import is_search, searches_in
from quorate.storage.atomic import explaining, write_atomically, write_fully
from quorate.storage.fencing import FolderLock, Holder
from quorate.storage.run_folder import LAST, RunFolder, claim_folder, finite, folder_meant, open_to_group


class SearchFolder:
    """One search on the disk; it explains itself to a person who opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.search_file = path / "search.yaml"
        self.job_file = path / "job.yaml"
        self.log_file = path / "trials.jsonl"
        self.trials = path / "trials"
        self.tune_state = path / "tune"
        self.best_job_file = path / "best-job.yaml"
        self.report_page = path / "report.html"
        self.report_text = path / "report.md"
        self.lock_file = path / "lock"
        self._lock = FolderLock(self.lock_file, f"the search {self.name}", "stop it with Ctrl-C")

    @classmethod
    def create(
        cls, runs: Path, name: str, search: str, job: str, *, is_private: bool = False, is_shared: bool = False
    ) -> "SearchFolder":
        """Make the folder of a new search, ``name-0001`` or the number after the highest there is, with the resolved
        search and its base job in it. It is for its owner only, or shared with the group; a job with secrets is not."""
        with explaining(f"cannot make a search's folder in {runs}", "Choose another folder with `runs`."):
            runs.mkdir(parents=True, exist_ok=True)
            folder = cls(claim_folder(runs, name))
            if is_shared:
                open_to_group(folder.path)
            folder.trials.mkdir()
            write_atomically(folder.job_file, job, 0o600 if is_private else 0o644)
            # The last: with it the folder is a search.
            write_atomically(folder.search_file, search)
            return folder

    @classmethod
    def find(cls, runs: Path, reference: str) -> "SearchFolder":
        """The search that a person means by a name, a unique prefix of one, a path, or ``last``, the newest."""
        found = cls.all_in(runs)
        names = [folder.name for folder in found]
        if reference == LAST and found:
            return found[-1]
        if (path := folder_meant(runs, reference, names, is_search)) is not None:
            return cls(path)
        there = f"there are {', '.join(names[::-1])}" if names else "it has none; `quorate tune search.yaml` makes one"
        raise RunError(f"there is no search {reference!r} in {runs.absolute()}; {there}")

    @classmethod
    def meant(cls, runs: Path, reference: str) -> "SearchFolder | None":
        """The search that is meant where a run may be meant as well; none where it is a run, or nothing at all.

        ``last`` is the newest of both, and a prefix is a run's if there is one that begins like it.
        """
        with contextlib.suppress(RunError):
            found = cls.find(runs, reference)
            if reference in (found.name, str(found.path)) or is_search(Path(reference).expanduser()):
                return found
            others = RunFolder.all_in(runs)
            if reference == LAST:
                return found if not others or others[-1].created < found.created else None
            return None if any(run.name.startswith(reference) for run in others) else found
        return None

    @classmethod
    def all_in(cls, runs: Path) -> tuple["SearchFolder", ...]:
        """All searches in a folder, oldest first; none where there is no such folder, or it may not be looked into."""
        found = map(cls, searches_in(runs))
        return tuple(sorted(found, key=lambda folder: (folder.created, folder.name)))

    @property
    def created(self) -> datetime:
        """When it began, as its log says: the times of files change when a search is copied."""
        damage = (OSError, ValueError, KeyError, TypeError, OverflowError)
        with contextlib.suppress(*damage), opened_regular(self.log_file) as log:
            return datetime.fromtimestamp(json.loads(log.readline())["time"], UTC)
        with explaining(f"cannot look at the search {self.name} in {self.path.parent}"):
            return datetime.fromtimestamp(self.search_file.stat().st_mtime, UTC)

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.trials / name)

    def holder(self) -> Holder | None:
        """The driver that is at work on this search, if there is one."""
        return self._lock.holder()

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep every other driver out, for as long as this process lives at most."""
        return self._lock.held()

    def tell(self, kind: str, trial: int | None = None, **fields: Any) -> dict[str, Any]:
        """Append a line to the log, and return it; it is on the disk then. Only the driver does this.

        A line that a crash has cut short is ended first, so that it spoils no other. The time is in microseconds, as
        runs have theirs: of two that are made within a millisecond the later one is the last.
        """
        numbered = {} if trial is None else {"trial": trial}
        line: dict[str, Any] = finite({"time": round(time.time(), 6), "kind": kind, **numbered, **fields})
        with explaining(f"cannot write {self.log_file}"):
            descriptor = open_regular(self.log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                text = f"{json.dumps(line, allow_nan=False)}\n"
                write_fully(descriptor, (("\n" if torn else "") + text).encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return line
