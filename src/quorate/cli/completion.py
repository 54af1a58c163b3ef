"""What the shell offers when Tab is pressed: names of runs, and job files.

A completion is silent: where nothing can be offered, for whatever reason, the shell goes on to offer files.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import typer

JOB_FILE_ENDINGS = {".yaml", ".yml"}
_NEEDS_NO_QUOTES = re.compile(r"[\w.,/~+@%-]+")


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the runs in the folder of `--runs`, and `last`, that begin like this."""
    from quorate.storage.run_search import LAST, is_run, runs_folder

    try:
        runs = runs_folder(context.params.get("runs"))
        names = sorted(folder.name for folder in runs.iterdir() if is_run(folder))
    except OSError:
        return []
    return [name for name in (*names, LAST) if names and name.startswith(incomplete)]


def job_files(incomplete: str) -> list[str]:
    """Job files in the folder that is being typed, and in the folders just below it, that begin like this."""
    typed = "".join(incomplete.rpartition("/")[:2])
    try:
        found = sorted(f"{typed}{file}" for file in _job_files_below(Path(typed).expanduser()))
    except (OSError, RuntimeError):  # the latter for a home that nobody has
        return []
    return [path for path in found if path.startswith(incomplete) and _NEEDS_NO_QUOTES.fullmatch(path)]


def _job_files_below(folder: Path) -> Iterator[Path]:
    """Relative to the folder. One level down as well: the shell would put a space behind the name of a folder."""
    for pattern in ("*", "*/*"):
        for path in folder.glob(pattern):
            file = path.relative_to(folder)
            if file.suffix in JOB_FILE_ENDINGS and not any(part.startswith(".") for part in file.parts):
                yield file
