"""The source of a run's task, kept in the run's folder: written once, whole or not at all.

::

    source/index.json                 which file is the task's, and where it lay, relative to the run
    source/task.py, source/nets.py    the files, by their names below an import root
"""

import json
import logging
import os
import secrets
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
class SourcePage:
    """A task's source, and where the task's file was, relative to the run's folder.

    At another place, beside a copy of the run, it lies as one page; nobody has looked yet whose it is.
    """

    source: TaskSource
    found_at: str | None

    @classmethod
    def read(cls, page: bytes) -> "SourcePage | None":
        """From what `to_page` gave. What is no such page is left out: a run can go on by the task itself."""
        try:
            content = json.loads(page)
            return SourcePage(TaskSource.from_json(json.dumps(content["source"])), _checked(content["found_at"]))
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the task's source in the copy of the run is damaged, and is left out: %s", error)
            return None

    def to_page(self) -> bytes:
        page = {"found_at": self.found_at, "source": json.loads(self.source.to_json())}
        return json.dumps(page, indent=1).encode() + b"\n"

    def keep(self, run: Path) -> None:
        """Keep it in a run's folder: from then on it is the task of that run, wherever its own file is gone."""
        temporary = run / f"{_WRITING}{secrets.token_hex(4)}"
        index = {"main": self.source.main, "found_at": self.found_at, "files": sorted(self.source.files)}
        try:
            for left in run.glob(f"{_WRITING}*"):
                discard(left)  # by a launcher that died: whoever writes here holds the run's lock
            # For the owner only: people write passwords and tokens into code, and a runs folder may be for all to read.
            temporary.mkdir(mode=0o700)
            for name, content in self.source.files.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                write_new_file(temporary / name, [content], 0o600)
            write_new_file(temporary / INDEX, [json.dumps(index, indent=1).encode() + b"\n"], 0o600)
            sync_folder(temporary)
            move_into_place(temporary, run / FOLDER)
        except OSError as error:
            raise JobError(f"cannot keep the task's source in {run}: {error.strerror or error}.") from error
        finally:
            discard(temporary)


@dataclass(frozen=True)
class KeptSource(SourcePage):
    """The source that a run keeps, in a folder of its own."""

    folder: Path


def keep_source(run: Path, source: TaskSource, file: Path | None) -> None:
    """Keep a task's source in a run's folder, unless one is kept already; `file` is where the task's file is."""
    if not (run / FOLDER).exists():
        SourcePage(source, None if file is None else os.path.relpath(file, run)).keep(run)


def read_source(run: Path) -> KeptSource | None:
    """The source that a run keeps; None for one that keeps none, or whose folder is not as it was written."""
    folder = run / FOLDER
    try:
        index = json.loads(_read(folder / INDEX))
        names, found_at = list(index["files"]), _checked(index["found_at"])
        check_names(index["main"], names)  # before one of them is read: it may be any file of this machine
        return KeptSource(TaskSource(index["main"], {name: _read(folder / name) for name in names}), found_at, folder)
    except FileNotFoundError as error:
        if folder.exists():
            log.warning("the source that is kept in %s is not complete: %s is missing", folder, error.filename)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the source that is kept in %s cannot be read: %s", folder, error)
    return None


def _read(file: Path) -> bytes:
    size = file.stat().st_size
    if size > MOST_KEPT:
        raise ValueError(f"{file.name} has {size:,} bytes, and no more than {MOST_KEPT:,} are kept")
    return read_regular(file)


def _checked(found_at: object) -> str | None:
    if not isinstance(found_at, str | None):
        raise ValueError(f"found_at is {found_at!r}")
    return found_at
