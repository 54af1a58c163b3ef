"""The folder of run folders, the clock by which they are ordered, and the folder of temporary files."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from quorate.doctor.finding import Finding, Level
from quorate.observe.quantities import duration, size
from quorate.storage.lock import hold

LITTLE, TOO_LITTLE = 2 * 10**9, 10**8
CLOCKS_AGREE = timedelta(seconds=5)
VARIABLE = "TMPDIR"


@dataclass(frozen=True)
class Trial:
    """What came of writing a file in a folder: trouble, or a file; and how much space there is."""

    folder: Path
    trouble: str = ""
    free: int = 0


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there already."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def try_to_write(folder: Path) -> Trial:
    """Write a file as a run does, lock it, and remove it again."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".quorate-doctor-") as file:
            file.write(b"may I?\n")
            file.flush()
            os.fsync(file.fileno())
            with hold(Path(file.name)):
                pass
        space = os.statvfs(folder)
    except OSError as error:
        return Trial(folder, trouble=error.strerror or str(error))
    return Trial(folder, free=space.f_bavail * space.f_frsize)


def check_runs_folder(runs: Path, trial: Trial) -> Finding:
    """Whether runs can be made in it. The trial was made there, or in the nearest folder above that is there."""
    elsewhere = "Choose another folder with `runs`, such as --set runs=/data/runs"
    if trial.trouble:
        text = f"nothing can be written in {trial.folder}: {trial.trouble}"
        return Finding("runs folder", Level.PROBLEM, text, elsewhere)
    made = "" if trial.folder == runs.absolute() else ", made by the first run"
    text = f"{runs}{made}: {size(trial.free)} free"
    if trial.free < TOO_LITTLE:
        return Finding("runs folder", Level.PROBLEM, text, f"Make room, or: {elsewhere}")
    if trial.free < LITTLE:
        text = f"{text}; checkpoints may fill it"
        return Finding("runs folder", Level.WARNING, text, "Make room, or keep fewer with checkpoint: {keep: 1}")
    return Finding("runs folder", Level.OK, text)


def check_clock(now: datetime, newest_run: datetime | None) -> Finding:
    """`last` is the run that was created last, by the clock of the machine that did it."""
    if newest_run is None or newest_run - now <= CLOCKS_AGREE:
        return Finding("clock", Level.OK, f"{now:%Y-%m-%d %H:%M:%S %Z}")
    ahead = duration((newest_run - now).total_seconds())
    text = f"{now:%Y-%m-%d %H:%M:%S %Z}, but a run was created {ahead} later than that, and stays `last` until then"
    return Finding("clock", Level.WARNING, text, "Set the clock (NTP); until then give runs by their names.")


def check_temporary_folder(environment: Mapping[str, str], trial: Trial) -> Finding:
    """Where libraries put what they need for a moment."""
    said = environment.get(VARIABLE)
    if trial.trouble:
        text = f"nothing can be written in {trial.folder}: {trial.trouble}"
        return Finding("temporary files", Level.PROBLEM, text, f"export {VARIABLE}=FOLDER with one that is writable")
    if said and Path(said).absolute() != trial.folder.absolute():
        text = f"{VARIABLE} is {said}, where nothing can be written; {trial.folder} is used"
        return Finding("temporary files", Level.WARNING, text, f"unset {VARIABLE}, or make that folder writable")
    return Finding("temporary files", Level.OK, f"{trial.folder}: {size(trial.free)} free")
