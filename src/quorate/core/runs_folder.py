"""Where runs lie: what is a run's folder, where new ones are made, and where they are looked for."""

import contextlib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from quorate.core.addresses import is_url

USUAL_RUNS = Path("runs")
ORIGIN = "origin.json"
"""Says of copies whose they are."""
RUNS_ENV = "QUORATE_RUNS"
"""It sets the key `runs` of every job: what `train` writes there must be found there again."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's. A job file alone stands in folders of all kinds."""
    with contextlib.suppress(PermissionError):  # another's folder must not hide the others
        return (folder / "created").is_file() or ((folder / "job.yaml").is_file() and (folder / "checkpoints").is_dir())
    return False


def is_copy(reference: str) -> bool:
    """Whether a person means a copy of a run by this: a URL, or a folder that has one."""
    return is_url(reference) or (Path(reference).expanduser() / ORIGIN).is_file()


def is_search(folder: Path) -> bool:
    """Whether a folder is that of a hyperparameter search, whose trials are runs inside it."""
    with contextlib.suppress(PermissionError):
        return (folder / "search.yaml").is_file() and (folder / "trials").is_dir()
    return False


def searches_in(runs: Path) -> list[Path]:
    """The folders of all searches there; none where there is no such folder, or it may not be looked into."""
    with contextlib.suppress(OSError):
        return [folder for folder in runs.iterdir() if is_search(folder)]
    return []


def runs_folder(given: str | Path | None = None) -> Path:
    """The folder in which runs are looked for: the one that is given, that of the variable, or the usual one of the
    working folder; where that has no runs, that of the nearest folder above which has some, as a project's has, or
    that of the only folder just below which has some."""
    if said := given or os.environ.get(RUNS_ENV):
        return Path(said)
    if not _holds_runs(USUAL_RUNS):
        if (above := _nearest(Path.cwd().parents)) is not None:
            return above
        with contextlib.suppress(OSError):  # a folder that is in the way
            folders = (folder for folder in Path().iterdir() if folder.is_dir() and _is_own(folder))
            below = [runs for folder in folders if _holds_runs(runs := folder / USUAL_RUNS, own=True)]
            if len(below) == 1:
                return below[0]
    return USUAL_RUNS


def runs_of_job(folder: Path) -> Path:
    """The folder for the runs of a job file in this folder: the nearest one there or above that has runs. The first
    run makes one in the working folder if the job file lies there or below, otherwise beside the job file."""
    here, folder = Path.cwd(), Path(os.path.abspath(folder))  # noqa: PTH100 (without `..`, and by links as they are)
    real = folder.resolve()
    around = [folder, *folder.parents, real, *real.parents]
    if (nearest := _nearest(around)) is None:
        # Others' job files may be used: their folder is not the place for one's runs.
        is_beside = here not in around and _is_own(folder) and os.access(folder, os.W_OK)
        nearest = (folder if is_beside else here) / USUAL_RUNS
    return USUAL_RUNS if nearest == here / USUAL_RUNS else nearest


def as_typed(path: Path) -> str:
    """A run as it is named on a command line that is typed here: by its name where that is enough."""
    is_usual = path.parent.absolute() == runs_folder().absolute()
    return shlex.quote(path.name if is_usual else str(path))


def where_looked(runs: Path) -> str:
    """Where runs were looked for and not found, with the whole path."""
    is_usual = runs == USUAL_RUNS and not os.environ.get(RUNS_ENV)
    return f"{runs.absolute()} or a folder {USUAL_RUNS} above it" if is_usual else str(runs.absolute())


def _nearest(folders: Iterable[Path]) -> Path | None:
    return next((runs for each in folders if _holds_runs(runs := each / USUAL_RUNS, own=True)), None)


def _is_own(folder: Path) -> bool:
    return folder.stat().st_uid == os.getuid()


def _holds_runs(folder: Path, *, own: bool = False) -> bool:
    """Whether there is a run or a search in a folder; other tools call theirs `runs` as well. `own`: and it is the
    user's. Another's, in a folder that all may write to, are not those of the project: to resume one runs code."""
    try:
        has_some = any(is_run(inner) or (inner / "search.yaml").is_file() for inner in folder.iterdir())
        return has_some and (not own or _is_own(folder))
    except OSError:
        return False
