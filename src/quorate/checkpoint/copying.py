"""Copies of a run's checkpoints at a further place: what is to be copied and removed there, and copying it.

Nothing has to be remembered: what is here and not there is copied, the newest first, and what retention does not keep
is removed there too. So whenever a copier dies, and whoever goes on, the next look finds out what is left to do.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quorate.checkpoint.best import Watched
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.name import cursor_of
from quorate.checkpoint.place import Contents, Files, Place, files_of
from quorate.checkpoint.retention import Retention, surplus
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.cursor import Cursor
from quorate.core.regular_file import read_regular
from quorate.spec.job import JobSpec
from quorate.storage.kept_source import read_source
from quorate.storage.objects import StoreError
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

ORIGIN = "origin.json"
SOURCE_PAGE = "source.json"
LEFT_BEHIND = 24 * 3600.0
"""Seconds since its last change after which an unfinished copy is nobody's any more."""
LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Errands:
    """What there is to do at a place: checkpoints to copy, newest first; to remove, oldest first; and leftovers."""

    copy: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


def errands(here: Mapping[str, Files], there: Contents, retention: Retention, best: int | None, now: float) -> Errands:
    """What is to be done so that a place has what is here, and no more than retention keeps.

    What is here is never removed there, nor is the newest that is there. An unfinished copy is swept when it has not
    changed for a day: a younger one may be in the making, by another launcher of the same run.
    """
    copy = [name for name in here if there.whole.get(name) != here[name]]
    cursors = {cursor: name for name in there.whole if (cursor := cursor_of(name)) is not None}
    doomed = surplus(list(cursors), retention, best, max(cursors, default=None))
    old = [name for name, changed in there.unfinished.items() if changed is not None and now - changed > LEFT_BEHIND]
    return Errands(
        copy=tuple(sorted(copy, key=cursor_in, reverse=True)),
        remove=tuple(cursors[cursor] for cursor in doomed if cursors[cursor] not in here),
        sweep=tuple(sorted(name for name in old if name not in here)),
    )


def pause_after(failures: int, chance: float) -> float:
    """Seconds until the next try: twice as long each time, and not the same for everybody; `chance` is 0 to 1."""
    return min(LONGEST_PAUSE, 2.0 ** min(failures - 1, 10)) * (0.5 + chance / 2)


@dataclass(frozen=True)
class Source:
    """A run whose checkpoints are copied, and what its job says about which to keep.

    The source of its task is copied as well (`with_source`): in plain, so not beside encrypted checkpoints.
    """

    run: RunFolder
    retention: Retention
    watched: Watched
    with_source: bool = True

    @classmethod
    def of(cls, run: RunFolder, spec: JobSpec) -> "Source":
        """As a job says it."""
        rules = spec.checkpoint
        return cls(
            run,
            Retention(rules.keep, rules.keep_every),
            Watched.by(spec.model_dump(include={"evaluate"})),
            with_source=rules.source and rules.encrypt is None,
        )

    @property
    def origin(self) -> bytes:
        """Tells this run from another of the same name, on another machine say."""
        return json.dumps({"run": self.run.name, "created": self.run.created.isoformat()}).encode() + b"\n"

    def pages(self) -> dict[str, bytes]:
        """What a copy of a run has beside checkpoints."""
        files = [file for file in (self.run.job_file, self.run.environment_file) if file.is_file()]
        pages = {file.name: read_regular(file) for file in files}
        kept = read_source(self.run.path) if self.with_source else None
        return pages if kept is None else {**pages, SOURCE_PAGE: kept.to_page()}


@dataclass(frozen=True)
class Copied:
    """A checkpoint that was copied."""

    name: str
    bytes: int
    seconds: float


def copy_checkpoints(source: Source, place: Place, which: Sequence[CheckpointInfo] | None = None) -> tuple[Copied, ...]:
    """Copy these checkpoints of a run, or all of them, to a place, with what a resume needs beside them.

    Those that are there already are left as they are, and not returned; nothing is removed. Raises `StoreError` (with a
    remedy) for trouble with the place and `CheckpointError` for a checkpoint that is damaged. For `checkpoints copy`::

        place = place_for("s3://bucket/prefix", run.name)
        copied = copy_checkpoints(Source.of(run, spec), place)
    """
    claim(source, place)
    infos = CheckpointFolder(source.run.checkpoints).list() if which is None else which
    there = place.contents().whole
    missing = [info for info in infos if there.get(info.path.name) != files_of(info.manifest)]
    return tuple(copy_one(info, place) for info in sorted(missing, key=lambda info: info.cursor, reverse=True))


def claim(source: Source, place: Place) -> None:
    """Say whose copies these are, with what a resume needs; refuse a place that has those of another run."""
    present = place.read(ORIGIN)
    if present is None:
        place.write(ORIGIN, source.origin)
    elif present != source.origin:
        raise StoreError(
            f"{place}: there are copies of another run of that name ({_created(present)}). Choose another place with "
            "`checkpoint.to`, or another `name` for the job.",
            lasts=True,
        )
    for name, content in source.pages().items():
        if place.read(name) != content:
            place.write(name, content)
    if not source.with_source and place.read(SOURCE_PAGE) is not None:
        place.remove(SOURCE_PAGE)  # from before the checkpoints were encrypted, or the source was to stay at home


def copy_one(info: CheckpointInfo, place: Place) -> Copied:
    """Copy a checkpoint, and say what it took."""
    started = time.monotonic()
    size = place.put(info)
    return Copied(info.path.name, size, round(time.monotonic() - started, 3))


def _created(origin: bytes) -> str:
    try:
        return f"created {json.loads(origin)['created']}"
    except (ValueError, KeyError, TypeError):
        return "its origin.json cannot be read"


def cursor_in(name: str) -> Cursor:
    """The cursor of a checkpoint's name."""
    return cursor_of(name) or Cursor()
