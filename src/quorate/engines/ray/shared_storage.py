"""The part of a run that every host has to reach: checkpoints, events, and who is the coordinator.

It is the run's own folder, or one of the same name in a folder that all hosts have mounted. Then the run's folder links
to it, so that whoever looks into the run finds everything there.
"""

import contextlib
import secrets
import shutil
import stat
from pathlib import Path

from quorate.core.addresses import is_url
from quorate.core.errors import RunError
from quorate.storage.objects import ObjectMissing, ObjectStore, StoreError, open_store
from quorate.storage.run_folder import RunFolder

OWNER = "owner"
"""The file, in a run's folder in the storage, that says which run that is."""
REACH = ".reach-"
SHARED = ("checkpoints", "events.jsonl", "coordinators", "micro_batches.json", "identity.json", "coordinator.json")


def share(run: RunFolder, storage: Path | None) -> RunFolder:
    """The run's folder for all hosts. What an earlier part of the run has left at home moves there.

    One that is kept in an object store has no such folder: each host has one of its own, which shows what is there.
    """
    if storage is None or run.stored is not None:
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
    shared.path.mkdir(stat.S_IMODE(run.path.stat().st_mode), parents=True, exist_ok=True)
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
    """Whether hosts see the same place: each finds what this process wrote there, and answers in the same way."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.nonce = secrets.token_hex(8)
        self._files = _files_at(place)
        name = f"{REACH}{self.nonce}"
        try:
            for left in self._files.names():  # of a launcher that was killed: the run is this one's now
                if left.startswith(REACH):
                    self._files.remove(left)
            self._files.put(name, self.nonce.encode())
            if isinstance(self._files, ObjectStore) and self._files.create(name, b"another"):
                raise RunError(
                    f"engine.storage: {self._files} has replaced an object that was to be created only if it is not "
                    "there (If-None-Match: *). Without that two coordinators may take the same number: use another "
                    "store, or a folder that all hosts have mounted."
                )
        except StoreError as error:
            raise RunError(f"engine.storage: {error.message}") from None
        except OSError as error:
            raise RunError(f"{place} cannot be written ({error.strerror or error}).") from error

    def trouble_of(self, host: str, said: str) -> str:
        """Why a host that has said what is wrong there, or nothing, does not share the place."""
        with contextlib.suppress(OSError, StoreError):
            if not said and self._files.read(_answer_of(self.nonce, host)):
                return ""
        return said or "what it writes there is not seen here"

    def close(self) -> None:
        with contextlib.suppress(OSError, StoreError):
            for name in self._files.names():
                if name.startswith(f"{REACH}{self.nonce}"):
                    self._files.remove(name)


def why_out_of_reach(place: str, nonce: str, host: str) -> str:
    """On a host: what is wrong with the place; nothing if it is the launcher's, and can be written."""
    files = _files_at(place)
    try:
        if files.read(f"{REACH}{nonce}") != nonce.encode():
            return "what is there under this name is something else"
        files.put(_answer_of(nonce, host), nonce.encode())
    except (FileNotFoundError, ObjectMissing):
        return "there is no such folder, or another one of this name"
    except StoreError as error:
        return error.message.rstrip(".")
    except OSError as error:
        return error.strerror or str(error)
    return ""


class _Folder:
    """As much of a folder as a store of objects has as well."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, name: str, content: bytes) -> None:
        (self._path / name).write_bytes(content)

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def names(self) -> list[str]:
        return [entry.name for entry in self._path.iterdir()]

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


def _files_at(place: str) -> _Folder | ObjectStore:
    return open_store(place) if is_url(place) else _Folder(Path(place))


def _answer_of(nonce: str, host: str) -> str:
    return f"{REACH}{nonce}-{host}"
