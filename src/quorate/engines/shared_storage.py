"""The part of a run that every host has to reach: checkpoints, events, and who is the coordinator.

It is the run's own folder, or one of the same name in a folder that all hosts have mounted. Then the run's folder links
to it, so that whoever looks into the run finds everything there.
"""

import contextlib
import secrets
import shutil
from pathlib import Path

from quorate.core.errors import RunError
from quorate.storage.run_folder import RunFolder

OWNER = "owner"
"""The file, in a run's folder in the storage, that says which run that is."""
SHARED = ("checkpoints", "events.jsonl", "coordinators", "micro_batches.json", "coordinator.json")


def share(run: RunFolder, storage: Path | None) -> RunFolder:
    """The run's folder for all hosts. What an earlier part of the run has left at home moves there."""
    if storage is None:
        return run
    shared = RunFolder(storage / run.name)
    try:
        if shared.path.resolve() != run.path.resolve():
            _claim(run, shared)
        for folder in (shared.logs, shared.checkpoints, shared.path / "coordinators"):
            folder.mkdir(parents=True, exist_ok=True)
        if shared.path.resolve() == run.path.resolve():  # it is kept there as a whole
            return run
        for name in SHARED:
            _link(run.path / name, shared.path / name)
    except OSError as error:
        raise RunError(f"engine.storage: {shared.path} cannot be used ({error.strerror or error}).") from error
    return shared


def _claim(run: RunFolder, shared: RunFolder) -> None:
    """Two folders of runs may have one storage, and a run of the same name each: the first one has it there."""
    if run.checkpoints.resolve() == shared.checkpoints.resolve():
        return  # since an earlier part of it
    owner, created = shared.path / OWNER, run.created.isoformat()
    shared.path.mkdir(parents=True, exist_ok=True)
    try:
        with owner.open("x") as file:
            file.write(created)
    except FileExistsError:
        if owner.read_text() != created:
            raise RunError(
                f"engine.storage: {shared.path} is that of another run of this name. Give the job another name, or "
                "another storage."
            ) from None


def _link(here: Path, there: Path) -> None:
    if here.is_symlink() and here.resolve() == there.resolve():
        return
    # An earlier part of the run may have had another storage, where what it left stays.
    source = here.resolve()
    if source.is_dir():
        shutil.copytree(source, there, dirs_exist_ok=True)
    elif source.exists():
        shutil.copy2(source, there)
    if here.is_dir() and not here.is_symlink():
        shutil.rmtree(here)
    else:
        here.unlink(missing_ok=True)
    here.symlink_to(there)


class Reach:
    """Whether hosts see the same folder: each finds what this process wrote there, and answers in the same way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nonce = secrets.token_hex(8)
        try:
            for left in folder.glob(".reach-*"):  # of a launcher that was killed: the run is this one's now
                left.unlink(missing_ok=True)
            (folder / f".reach-{self.nonce}").write_text(self.nonce)
        except OSError as error:
            raise RunError(f"{folder} cannot be written ({error.strerror or error}).") from error

    @property
    def folder(self) -> str:
        return str(self._folder)

    def is_answered_by(self, host: str) -> bool:
        """Whether what a host says to have written is seen here."""
        return _answer_of(self._folder, self.nonce, host).exists()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f".reach-{self.nonce}*"):
                file.unlink()


def why_out_of_reach(folder: str, nonce: str, host: str) -> str:
    """On a host: what is wrong with the folder; nothing if it is the launcher's, and can be written."""
    place = Path(folder)
    try:
        if (place / f".reach-{nonce}").read_text() != nonce:
            return "the folder of this name is another one there"
        _answer_of(place, nonce, host).write_text(nonce)
    except FileNotFoundError:
        return "there is no such folder, or another one of this name"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _answer_of(folder: Path, nonce: str, host: str) -> Path:
    return folder / f".reach-{nonce}-{host}"
