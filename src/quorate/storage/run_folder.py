"""A run's folder: what it holds, how it is made and locked, and which one a person means."""

import contextlib
import difflib
import grp
import hashlib
import itertools
import json
import math
import os
import pwd
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from quorate.core.addresses import split_address
from quorate.core.cached import cached_property
from quorate.core.errors import DamagedFileError, JobError, RunError
from quorate.core.regular_file import read_regular
from quorate.core.runs_folder import is_run, is_search, where_looked
from quorate.storage.atomic import discard, explaining, write_atomically
from quorate.storage.fencing import FolderLock, Holder, Incarnations
from quorate.storage.objects import ObjectMissing, ObjectStore, StoreError, open_store

LAST = "last"
SHOWN = 8
_CREATED = "created"
_OWNERS = stat.S_IRWXU
_RESERVED = 32 << 10
STORED = "storage.json"
"""Says in which object store a run has what several hosts need."""


@dataclass(frozen=True)
class Door:
    """Where the owner of a run asks its coordinator for something: an address, the job's token, and where the job is
    encrypted the certificate of its authority (PEM), by which the coordinator is known."""

    address: str
    token: str = field(repr=False)
    authority: str = field(default="", repr=False)


def stored_by(run: Path) -> ObjectStore | None:
    """Where a run on several hosts keeps what all of them need, if that is an object store: its prefix there."""
    try:
        return _opened(str(json.loads(read_regular(run / STORED))["url"]), os.getpid())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{run / STORED} cannot be read: {error!r}") from None


class RunFolder:
    """One run on the disk; it explains itself to a person who opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.job_file = path / "job.yaml"
        self.events_file = path / "events.jsonl"
        self.result_file = path / "result.json"
        self._reserve = path / ".reserve"
        self.environment_file = path / "environment.json"
        self.fetched_file = path / "fetched.json"
        self.micro_batches_file = path / "micro_batches.json"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.address_file = path / "coordinator.json"
        self.lock_file = path / "lock"
        self.incarnations = Incarnations(path / "coordinators", lambda: self.stored)
        self._lock = FolderLock(self.lock_file, f"run {self.name}", f"end it: quorate stop {self.name}")

    @cached_property
    def stored(self) -> ObjectStore | None:
        return stored_by(self.path)

    def keep_in(self, store: ObjectStore) -> None:
        """Have what all hosts need in an object store from now on. Several folders of one run may say so: one on each
        host."""
        self._write(self.path / STORED, {"url": store.url})
        self.__dict__.pop("stored", None)

    @classmethod
    def create(cls, runs: Path, name: str, beside: Path | ObjectStore | None = None) -> "RunFolder":
        """Make the folder of a new run: ``name-0001``, or the number after the highest there is; also of those in the
        folder or store `beside`, where it is to be known by the same name."""
        others: Iterable[Path] = ()
        if isinstance(beside, ObjectStore):
            others = [Path(other) for other in beside.names()]
        elif beside is not None and beside.is_dir():
            others = beside.iterdir()
        if runs.is_file():
            raise RunError(f"{runs} is a file, and not a folder for runs. Rename it, or choose a folder with `runs`.")
        with explaining(f"cannot make a run folder in {runs}", "Choose another folder with `runs`."):
            runs.mkdir(parents=True, exist_ok=True)
            run = cls(claim_folder(runs, name, others))
            try:
                run.make()
                write_creation(run.path)
            except BaseException:
                run._take_back()
                raise
            return run

    def make(self) -> None:
        """Make the folders of a run that only its owner may look into."""
        self.path.mkdir(_OWNERS, parents=True, exist_ok=True)
        self.logs.mkdir()
        self.checkpoints.mkdir()

    def open_to_group(self) -> None:
        """Let the group of its folder look into the run."""
        with explaining(f"cannot share {self.path}"):
            open_to_group(self.path)

    @classmethod
    def find(cls, runs: Path, reference: str) -> "RunFolder":
        """The run that a person means by a name, a unique prefix of one, a path, or ``last``, the newest."""
        names = [run.name for run in cls.all_in(runs)]
        if reference == LAST:
            if not names:
                raise RunError(
                    f"there are no runs in {where_looked(runs)} yet; `quorate train job.yaml` makes one, "
                    "and --runs FOLDER looks elsewhere"
                )
            return cls(runs / names[-1])
        found = folder_meant(runs, reference, names, is_run)
        if found is None:
            raise RunError(_not_found(runs, reference, names))
        return cls(found)

    @classmethod
    def all_in(cls, runs: Path) -> tuple["RunFolder", ...]:
        """All runs in a folder, oldest first; none where there is no such folder."""
        try:
            dated = [(created, folder) for folder in runs.iterdir() if (created := _created(folder)) is not None]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise RunError(
                f"cannot look for runs in {runs.absolute()}: {error.strerror}. Say where they are with --runs FOLDER, "
                "or give a path."
            ) from error
        return tuple(cls(folder) for _, folder in sorted(dated))

    @property
    def created(self) -> datetime:
        with explaining(f"cannot look at run {self.name} in {self.path.parent}"):
            return _read_creation(self.path)

    @property
    def id(self) -> str:
        """What tells it from runs of the same name in other folders. It stays when the run is moved or copied."""
        return _digest(f"{self.name} {self.created.isoformat()}")[:12]

    def holder(self) -> Holder | None:
        """The launcher that is at work on this run, if there is one."""
        return self._lock.holder()

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep every other launcher out of this run, for as long as this process lives at most."""
        return self._lock.held()

    def next_incarnation(self, above: int = 0, launch: str = "") -> int:
        """A number higher than any coordinator of this run had before, and than `above`, which one may have had
        elsewhere; on the disk before it is returned."""
        with explaining(f"cannot number the coordinator of run {self.name} in {self.path}"):
            return self.incarnations.take(above, launch)

    def write_address(self, address: str, token: str, door: Mapping[str, str] | None = None) -> None:
        """Say where the coordinator listens, to the owner of the run only; and where the job is encrypted, at which
        door without a key, and by which certificate it is known there."""
        fields = {"address": address, "token": token} | ({} if door is None else {"door": dict(door)})
        self._write(self.address_file, fields, mode=0o600)
        if self.stored is not None:
            # Who has the token knows its digest. It is in no object: others may read the bucket.
            public = {"address": address, "token_digest": _digest(token)}
            self.stored.put(self.address_file.name, json.dumps(public).encode())

    def read_door(self) -> Door:
        """Where to ask the coordinator for something. OSError if it cannot be read, ValueError if it is damaged."""
        try:
            fields = json.loads(read_regular(self.address_file))
            door = fields.get("door", fields)
            split_address(door["address"])
            return Door(door["address"], str(fields["token"]), str(door.get("authority", "")))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.address_file} is damaged: {error!r}") from None

    def read_address(self, token: str | None = None) -> str | None:
        """Where the coordinator listens, if it does and if this is asked by the owner of the run; by one who knows the
        job's token only the coordinator of that job is meant."""
        try:
            try:
                told = json.loads(read_regular(self.address_file))
            except FileNotFoundError:
                if self.stored is None:
                    raise
                told = json.loads(self.stored.read(self.address_file.name))
            address = told.get("address")
            if token is not None and told.get("token_digest", _digest(told.get("token", ""))) != _digest(token):
                return None
        except (OSError, ValueError, AttributeError, StoreError):
            return None
        return address if isinstance(address, str) else None

    def remove_address(self, address: str | None = None) -> None:
        """Say no more where the coordinator listens; with an address, only if it is that one's."""
        if address is not None and self.read_address() != address:
            return
        with explaining(f"cannot remove {self.address_file}"):
            # What a link leads to, where hosts share the run: the token is in it.
            self.address_file.resolve().unlink(missing_ok=True)
        if self.stored is not None:
            with contextlib.suppress(StoreError):  # nobody listens there, which whoever asks finds out
                self.stored.remove(self.address_file.name)

    def write_job(self, text: str, *, is_private: bool = False) -> None:
        """Write down the job; for its owner only, if there is something secret in it, and so are then the checkpoints,
        whose manifests have it, too."""
        with explaining(f"cannot write {self.job_file}"):
            write_atomically(self.job_file, text, 0o600 if is_private else 0o644)
            if is_private and self.checkpoints.is_dir():
                self.checkpoints.chmod(0o700)

    def write_result(self, result: dict[str, Any]) -> None:
        # Only now: every command imports this module, and few write a result.
        from quorate.core.masking import mask_all

        masked = mask_all(result)
        try:
            self._write(self.result_file, masked)
        except JobError:
            if not self._reserve.exists():
                raise
            discard(self._reserve)
            self._write(self.result_file, masked)

    @contextlib.contextmanager
    def reserving(self) -> Iterator[None]:
        """In this block there is room for a result, also on a disk that is full by then: how the job has ended must not
        be what a full disk hides."""
        with contextlib.suppress(OSError), self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVED)
        try:
            yield
        finally:
            discard(self._reserve)

    def read_result(self) -> dict[str, Any] | None:
        """How the run ended, if it did. What was not finite is None."""
        try:
            return self._read(self.result_file)
        except DamagedFileError as error:
            raise DamagedFileError(f"{error.message}. quorate resume continues as if it were not there") from None

    def whole_result(self) -> dict[str, Any] | None:
        """The same, and nothing as well where the file is damaged."""
        try:
            return self.read_result()
        except DamagedFileError:
            return None

    def write_environment(self, environment: dict[str, Any]) -> None:
        """What the run's bits depend on besides its job: versions, device, digests of code and data."""
        self._write(self.environment_file, environment)

    def read_environment(self) -> dict[str, Any] | None:
        try:
            return self._read(self.environment_file)
        except DamagedFileError as error:
            raise DamagedFileError(
                f"{error.message}. It says what the run's bits depend on besides its job: versions, processor, digest "
                "of the code; quorate resume takes that from the newest checkpoint, and writes it again"
            ) from None

    def write_fetched(self, place: str, task: str = "") -> None:
        """Say that the run came from a place where others may write, and which task the job names that lay there; or,
        without a task, that a checkpoint may have come of a run that began here."""
        self._write(self.fetched_file, {"from": place, "task": task})

    def read_fetched(self) -> dict[str, Any] | None:
        """The same; None of a run of which all is from here."""
        fetched = self._read(self.fetched_file)
        if fetched is not None and not all(isinstance(fetched.get(key), str) for key in ("from", "task")):
            raise DamagedFileError(f"{self.fetched_file} does not say from where and which task; it was edited")
        return fetched

    def write_micro_batches(self, changes: Sequence[tuple[int, int]]) -> None:
        """Since which steps lanes have more micro-batches than the job says, where memory ran out (step, number).
        Workers write it, all the same, before such a step is done."""
        known = {"since": [list(change) for change in changes]}
        if self.stored is not None:
            self.stored.put(self.micro_batches_file.name, json.dumps(known).encode())
        else:
            self._write(self.micro_batches_file, known)

    def read_micro_batches(self) -> tuple[tuple[int, int], ...]:
        try:
            name = self.micro_batches_file.name
            found = self._read(self.micro_batches_file) if self.stored is None else json.loads(self.stored.read(name))
        except ObjectMissing:
            found = None
        known = (found or {}).get("since", ())
        return tuple((int(step), int(count)) for step, count in known)

    def _write(self, file: Path, fields: dict[str, Any], mode: int = 0o644) -> None:
        # No NaN or Infinity, which Python would write and most readers of JSON refuse.
        text = json.dumps(finite(fields), indent=2, allow_nan=False)
        with explaining(f"cannot write {file}"):
            write_atomically(file, f"{text}\n", mode)

    def _read(self, file: Path) -> dict[str, Any] | None:
        with explaining(f"cannot read {file}"):
            try:
                content = read_regular(file)
            except FileNotFoundError:
                return None
        try:
            fields = json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            told = f"{file} is not JSON ({error}); it was cut off or edited after the run wrote it"
            raise DamagedFileError(told) from None
        if not isinstance(fields, dict):
            raise DamagedFileError(f"{file} holds a {type(fields).__name__} where an object is expected; it was edited")
        return fields

    def _take_back(self) -> None:
        """Leave no half-made run behind: it would be found as the last one."""
        with contextlib.suppress(OSError):
            for child in self.path.iterdir():
                child.rmdir() if child.is_dir() else child.unlink()
            self.path.rmdir()


def why_untrusted(runs: Path, reference: str, folder: Path) -> str:
    """Why the run or search that a reference means may be others'; nothing if it lies in the folder of runs in use.

    What its job names is run, and whoever can write to a copy can make it look like a run.
    """
    return "" if is_in_use(runs, reference, folder) else _why_others(folder)


def is_in_use(runs: Path, reference: str, folder: Path) -> bool:
    """Whether the run or search that a reference means lies in the folder of runs in use."""
    folders = (folder.absolute().parent, Path(reference).expanduser().absolute().parent)  # in `runs` may be a link
    return os.path.realpath(runs) in map(os.path.realpath, folders)


def refuse_untrusted(why: str, folder: Path, what: str, remedy: str = "add --trust-job, or ") -> None:
    """Refuse what uses the job of a run or search that may be others' (`why_untrusted`); `what` of it is not used."""
    if why:
        raise RunError(
            f"{why}, so {folder.name} may be anybody's, and {what}. If you trust it, {remedy}say that your runs are "
            f"there: --runs {folder.absolute().parent}"
        )


def _why_others(folder: Path) -> str:
    """Why others may have written what is in a run's folder; nothing if only the user can, as far as modes tell."""
    with explaining(f"cannot look at {folder}"):
        for path, owners in ((folder, {os.getuid()}), (folder.parent, {os.getuid(), 0})):
            facts = path.stat()
            if facts.st_uid not in owners:
                return f"{path} belongs to user {facts.st_uid}"
            shared = stat.S_IWOTH if _is_users_own(facts.st_gid) else stat.S_IWOTH | stat.S_IWGRP
            # Where that is set others can put something beside the run, and nothing in its place.
            is_sticky = path != folder and facts.st_mode & stat.S_ISVTX
            if facts.st_mode & shared and not is_sticky:
                return f"others can write to {path} (mode {facts.st_mode & 0o777:o})"
    return ""


def _is_users_own(group: int) -> bool:
    """Whether a group is there for the user alone, as many systems make one for each."""
    with contextlib.suppress(KeyError):
        user, found = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
        return found.gr_name == user and set(found.gr_mem) <= {user}
    return False


def write_creation(folder: Path, moment: datetime | None = None) -> None:
    """Say that a run is created now; or that it was, at another place."""
    write_atomically(folder / _CREATED, f"{(moment or datetime.now(UTC)).isoformat()}\n")


def _read_creation(folder: Path) -> datetime:
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
        return _read_creation(folder) if is_run(folder) else None
    except OSError:
        return None  # one folder that is in the way, or is being removed, must not hide the others


def _not_found(runs: Path, reference: str, names: list[str]) -> str:
    for folder in (Path(reference).expanduser(), runs / reference):
        if reference and is_search(folder):
            trials = folder / "trials"
            return f"{reference} is a search, not a run: its trials are runs in {trials}; `runs` says where to look"
        if reference and folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
            return (
                f"you may not look into {folder.absolute()}, which belongs to user {folder.stat().st_uid}. "
                "`share: group` in a job opens its runs to the group"
            )
    if os.sep in reference:
        return f"{reference} is not a run folder: it has no file `created`, which every run has"
    if reference.endswith((".yaml", ".yml")):
        return f"{reference} is a job file, and no run. quorate train {reference} begins one; quorate runs lists them"
    if not names:
        return (
            f"there is no run {reference!r}: there are none at all in {where_looked(runs)}; "
            "--runs FOLDER looks elsewhere, and a path names any run"
        )
    close = difflib.get_close_matches(reference, names, n=SHOWN, cutoff=0.5)
    hint = f"did you mean {_listed(close)}?" if close else f"there are {_listed(names[::-1])}"
    return f"there is no run {reference!r} in {runs.absolute()}; {hint}"


@cache
def _opened(url: str, pid: int) -> ObjectStore:  # noqa: ARG001 (a fork cannot use what its parent has opened)
    """One for all that this process does there: to open it takes a while."""
    return open_store(url)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def folder_meant(runs: Path, reference: str, names: Sequence[str], is_one: Callable[[Path], bool]) -> Path | None:
    """The folder that a person means by one of these names, a unique prefix of one, or a path; None for none."""
    path = Path(reference).expanduser()
    if reference not in names and is_one(path):
        return path.resolve()  # "." has no name
    matches = [name for name in names if reference and name.startswith(reference)]
    if len(matches) > 1 and reference not in names:
        raise RunError(f"{reference!r} may be any of {_listed(matches)}; give more of the name, or `{LAST}`")
    return runs / (reference if reference in names else matches[0]) if matches else None


def claim_folder(runs: Path, name: str, others: Iterable[Path] = ()) -> Path:
    """Make the numbered folder. Making it is the claim: of two launchers only one can."""
    pattern = re.compile(re.escape(name) + r"-(\d{4,})")
    taken = [int(match[1]) for entry in (*runs.iterdir(), *others) if (match := pattern.fullmatch(entry.name))]
    for number in itertools.count(max(taken, default=0) + 1):
        path = runs / f"{name}-{number:04d}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(_OWNERS)
            break
    return path


def open_to_group(folder: Path) -> None:
    """Let the group of a folder look into it."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRGRP | stat.S_IXGRP)


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for, NaN and the infinities, in mappings and lists too."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
