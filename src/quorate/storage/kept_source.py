"""The source of a run's task, kept in the run's folder: written once, whole or not at all.

::

    source/index.json                 which file is the task's, and where it lay, relative to the run
    source/task.py, source/nets.py    the files, by their names below an import root
"""

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quorate.core.errors import JobError
from quorate.core.regular_file import read_regular
from quorate.core.task_source import MOST_KEPT, TaskSource, check_names
from quorate.storage.atomic import discard, move_into_place, sync_folder, write_new_file

log = logging.getLogger(__name__)

FOLDER = "source"
INDEX = "index.json"
_WRITING = ".source-"


@dataclass(frozen=True)
class KeptSource:
    """A task's source, the folder that it is kept in, and where the task's file was, relative to the run's folder."""

    source: TaskSource
    folder: Path
    found_at: str | None

    def to_page(self) -> bytes:
        """All of it in one file, for a copy of the run at another place."""
        page = {"found_at": self.found_at, "source": json.loads(self.source.to_json())}
        return json.dumps(page, indent=1).encode() + b"\n"


def keep_source(run: Path, source: TaskSource, file: Path | None) -> None:
    """Keep a task's source in a run's folder, unless one is kept already; `file` is where the task's file is."""
    if not (run / FOLDER).exists():
        _write(run, source, None if file is None else os.path.relpath(file, run))


@dataclass(frozen=True)
class SourcePage:
    """A task's source as it lies at another place, in one file; nobody has looked yet whose it is."""

    source: TaskSource
    found_at: str | None

    @classmethod
    def read(cls, page: bytes) -> "SourcePage | None":
        """From what `to_page` gave. What is no such page is left out: a run can go on by the task itself."""
        try:
            content = json.loads(page)
            source = TaskSource.from_json(json.dumps(content["source"]))
            found_at = content["found_at"]
            if not isinstance(found_at, str | None):
                raise ValueError(f"found_at is {found_at!r}")
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the task's source in the copy of the run is damaged, and is left out: %s", error)
            return None
        return cls(source, found_at)

    def keep(self, run: Path) -> None:
        """Keep it in a run's folder: from then on it is the task of that run, wherever its own file is gone."""
        _write(run, self.source, self.found_at)


def read_source(run: Path) -> KeptSource | None:
    """The source that a run keeps; None for one that keeps none, or whose folder is not as it was written."""
    folder = run / FOLDER
    try:
        index = json.loads(_read(folder / INDEX))
        names, found_at = list(index["files"]), index["found_at"]
        check_names(index["main"], names)  # before one of them is read: it may be any file of this machine
        if not isinstance(found_at, str | None):
            raise ValueError(f"found_at is {found_at!r}")
        return KeptSource(TaskSource(index["main"], {name: _read(folder / name) for name in names}), folder, found_at)
    except FileNotFoundError as error:
        if folder.exists():
            log.warning("the source that is kept in %s is not whole: %s is missing", folder, error.filename)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the source that is kept in %s cannot be read: %s", folder, error)
    return None


def _read(file: Path) -> bytes:
    size = file.stat().st_size
    if size > MOST_KEPT:
        raise ValueError(f"{file.name} has {size:,} bytes, and no more than {MOST_KEPT:,} are kept")
    return read_regular(file)


def _write(run: Path, source: TaskSource, found_at: str | None) -> None:
    temporary = run / f"{_WRITING}{secrets.token_hex(4)}"
    index = {"main": source.main, "found_at": found_at, "files": sorted(source.files)}
    with _explaining(run):
        for left in run.glob(f"{_WRITING}*"):
            discard(left)  # by a launcher that died: whoever writes here holds the run's lock
        try:
            # For the owner only: people write passwords and tokens into code, and a runs folder may be for all to read.
            temporary.mkdir(mode=0o700)
            for name, content in source.files.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                write_new_file(temporary / name, [content], 0o600)
            write_new_file(temporary / INDEX, [json.dumps(index, indent=1).encode() + b"\n"], 0o600)
            sync_folder(temporary)
            move_into_place(temporary, run / FOLDER)
        finally:
            discard(temporary)


@contextlib.contextmanager
def _explaining(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError(f"cannot keep the task's source in {run}: {error.strerror or error}.") from error
