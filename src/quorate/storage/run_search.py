"""Where runs are, which folders are runs and since when, and which of them a person means."""

import contextlib
import difflib
import os
from datetime import UTC, datetime
from pathlib import Path

from quorate.core.errors import RunError
from quorate.core.regular_file import read_regular
from quorate.storage.atomic import write_atomically

USUAL = Path("runs")
VARIABLE = "QUORATE_RUNS"
"""It sets the key `runs` of every job: what `train` writes there must be found there again."""
LAST = "last"
SHOWN = 8
_CREATED = "created"


def runs_folder(given: str | Path | None = None) -> Path:
    """The folder of runs: the one that is given, that of the variable, or the usual one in the working folder."""
    return USUAL if not (said := given or os.environ.get(VARIABLE)) else Path(said)


def find_run(runs: Path, reference: str) -> Path:
    """The folder of the run with this name, unique prefix or path, or the newest for ``last``."""
    names = [folder.name for folder in list_runs(runs)]
    if reference == LAST:
        if not names:
            raise RunError(f"there are no runs in {runs} yet; `quorate train job.yaml` makes one, `runs` says where")
        return runs / names[-1]
    if reference in names:
        return runs / reference
    path = Path(reference).expanduser()
    if is_run(path):
        return path.resolve()  # "." has no name
    matches = [name for name in names if reference and name.startswith(reference)]
    if len(matches) == 1:
        return runs / matches[0]
    if matches:
        raise RunError(f"{reference!r} may be any of {_listed(matches)}; give more of the name, or `{LAST}`")
    raise RunError(_not_found(runs, reference, names))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's. A job file alone stands in folders of all kinds."""
    return (folder / _CREATED).is_file() or ((folder / "job.yaml").is_file() and (folder / "checkpoints").is_dir())


def list_runs(runs: Path) -> list[Path]:
    """The folders of all runs, oldest first; none where there is no such folder."""
    try:
        dated = [(created, folder) for folder in runs.iterdir() if (created := _created(folder)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"cannot look for runs in {runs}: {error.strerror}. Say where they are with `runs`, or give a path."
        ) from error
    return [folder for _, folder in sorted(dated)]


def write_creation(folder: Path, moment: datetime | None = None) -> None:
    """Say that a run is created now; or that it was, at another place."""
    write_atomically(folder / _CREATED, f"{(moment or datetime.now(UTC)).isoformat()}\n")


def read_creation(folder: Path) -> datetime:
    """When a run was created. What is written counts: the times of files change when a run is copied."""
    marker = folder / _CREATED
    with contextlib.suppress(OSError, ValueError):
        written = datetime.fromisoformat(read_regular(marker).decode().strip())
        return written if written.tzinfo else written.replace(tzinfo=UTC)
    # The folder's own time changes with its content: it is the last resort.
    existing = marker if marker.is_file() else folder
    return datetime.fromtimestamp(existing.stat().st_mtime, UTC)


def _created(folder: Path) -> datetime | None:
    """When a run was created; none for what is no run, is one no longer, or may not be looked into."""
    try:
        return read_creation(folder) if is_run(folder) else None
    except OSError:
        return None  # one folder that is in the way, or is being removed, must not hide the others


def _not_found(runs: Path, reference: str, names: list[str]) -> str:
    if os.sep in reference:
        return f"{reference} is not a run folder: it has no file `created`, which every run has"
    if not names:
        return f"there is no run {reference!r}: {runs} has no runs; `runs` says where to look"
    close = difflib.get_close_matches(reference, names, n=SHOWN, cutoff=0.5)
    hint = f"did you mean {_listed(close)}?" if close else f"there are {_listed(names[::-1])}"
    return f"there is no run {reference!r} in {runs}; {hint}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
