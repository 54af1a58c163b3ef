"""Which run a person means."""

import difflib
import os
from pathlib import Path

from quorate.core.errors import RunError

LAST = "last"
SHOWN = 8


def find_run(runs: Path, reference: str) -> Path:
    """The folder of the run with this name, unique prefix or path, or the newest for ``last``."""
    names = _by_age(runs)
    if reference == LAST:
        return runs / _newest(runs, names)
    if reference in names:
        return runs / reference
    path = Path(reference).expanduser()
    if is_run(path):
        return path
    matches = [name for name in names if reference and name.startswith(reference)]
    if len(matches) == 1:
        return runs / matches[0]
    if matches:
        raise RunError(f"{reference!r} may be any of {_listed(matches)}; give more of the name, or `{LAST}`")
    raise RunError(_not_found(runs, reference, names))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any((folder / file).is_file() for file in ("created", "job.yaml"))


def _by_age(runs: Path) -> list[str]:
    """Names of all runs, oldest first."""
    try:
        folders = [folder for folder in runs.iterdir() if is_run(folder)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"cannot look for runs in {runs}: {error.strerror}. Say where they are with `runs`, or give a path."
        ) from error
    return [folder.name for folder in sorted(folders, key=lambda folder: (_created(folder), folder.name))]


def _created(folder: Path) -> int:
    # The folder's own times change with its content; this file is written once.
    marker = folder / "created"
    return (marker if marker.is_file() else folder).stat().st_mtime_ns


def _newest(runs: Path, names: list[str]) -> str:
    if not names:
        raise RunError(f"there are no runs in {runs} yet; `quorate train job.yaml` makes one, `runs` says where")
    return names[-1]


def _not_found(runs: Path, reference: str, names: list[str]) -> str:
    if os.sep in reference:
        return f"{reference} is not a run folder: it has no job.yaml"
    if not names:
        return f"there is no run {reference!r}: {runs} has no runs; `runs` says where to look"
    close = difflib.get_close_matches(reference, names, n=SHOWN, cutoff=0.5)
    hint = f"did you mean {_listed(close)}?" if close else f"there are {_listed(names[::-1])}"
    return f"there is no run {reference!r} in {runs}; {hint}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
