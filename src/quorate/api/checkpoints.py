"""What can be done with the checkpoints of a run: verify, export and remove them, and use another key."""

import contextlib
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.api.result import LoadedModel, model_of
from quorate.checkpoint.listing import CheckpointInfo, Skipped, cursor_of, survey
from quorate.checkpoint.selection import BEST, LAST, best_among, own_among, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, JobError, QuorateError, RunError
from quorate.core.generation import Cursor, Phase
from quorate.core.user_code import given
from quorate.history.run_record import RunRecord
from quorate.spec.job import JobSpec
from quorate.spec.load import load_recorded
from quorate.storage.atomic import discard, move_into_place
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

NO_KEY = "the run is not encrypted (checkpoint.encrypt)"
_TORCH_ENDINGS = {".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True)
class Examined:
    """A checkpoint that was read through; `problem` is empty where it is whole, `foreign` where it is of the run."""

    path: Path
    bytes: int
    problem: str
    foreign: str = ""

    @property
    def cursor(self) -> Cursor:
        """By its name: nothing else may be left of it."""
        return cursor_of(self.path.name) or Cursor()


@dataclass(frozen=True)
class Verified:
    """Checkpoints that were read through, oldest first; and why it was not asked who wrote them, if it was not: without
    the key damage is found, and forgery is not."""

    examined: tuple[Examined, ...]
    not_authenticated: str

    def document(self, run: str) -> dict[str, Any]:
        """As `quorate checkpoints verify --json` prints it."""
        return {
            "run": run,
            "authenticated": not self.not_authenticated,
            "not_authenticated": self.not_authenticated or None,
            "damaged": sum(bool(each.problem) for each in self.examined),
            "checkpoints": [
                {
                    "name": each.path.name,
                    "step": each.cursor.step,
                    "evaluated": each.cursor.phase is Phase.EVALUATED,
                    "bytes": each.bytes,
                    "whole": not each.problem,
                    "problem": each.problem or None,
                    "foreign": each.foreign or None,
                }
                for each in self.examined
            ],
        }


def verify_run(run: RunFolder, which: str | None = None) -> Verified:
    """Read checkpoints through, all or those that `which` means (last, best, or a step)."""
    there = _Present.of(run)
    found = there.meant(which) if which is not None else there.found
    examined = (replace(there.examined(each), foreign=there.foreign(each)) for each in found)
    # A job that runs removes old ones at any moment: what is gone by now was not damaged.
    whole = tuple(each for each in examined if not each.problem or each.path.exists())
    return Verified(whole, there.not_authenticated)


def remove_from_run(run: RunFolder, which: Sequence[str], *, force: bool) -> tuple[Examined, ...]:
    """Remove checkpoints; not the only whole one, unless forced."""
    there = _Present.of(run)
    doomed = {each.path: each for word in which for each in there.meant(word)}
    rest = [each for each in there.own() if each.path not in doomed]
    if not force and not there.has_whole(rest) and there.has_whole(list(doomed.values())):
        raise RunError(
            f"without {', '.join(path.name for path in doomed)}, run {run.name} has no valid checkpoint left to resume "
            "from. Remove it all the same with --force"
        )
    removed = []
    for path, each in doomed.items():
        there.folder.remove(path)
        removed.append(Examined(path, each.bytes if isinstance(each, CheckpointInfo) else 0, ""))
    return tuple(removed)


@dataclass(frozen=True)
class _Present:
    """What is in the folder of a run, oldest first; with the key that its job names where that is at hand, and
    otherwise why it is without. The job is None where it cannot be read."""

    run: RunFolder
    folder: CheckpointFolder
    found: tuple[CheckpointInfo | Skipped, ...]
    not_authenticated: str
    job: JobSpec | None = None

    @classmethod
    def of(cls, run: RunFolder) -> "_Present":
        job, folder, why = None, CheckpointFolder.at(run.checkpoints), NO_KEY
        try:
            job = load_recorded(run.job_file, {}, []).spec
            folder = CheckpointFolder.of_job(run.checkpoints, job.checkpoint)
        except QuorateError as error:
            why = error.message
        return cls(run, folder, survey(run.checkpoints), "" if folder.cipher is not None else why, job)

    def foreign(self, found: CheckpointInfo | Skipped) -> str:
        """Why a checkpoint is not one of the run whose folder it lies in; nothing where that cannot be known."""
        return "" if self.job is None or isinstance(found, Skipped) else why_foreign(found, self.job)

    def own(self) -> list[CheckpointInfo | Skipped]:
        """Without those of other jobs; what is damaged may be of the run."""
        own = own_among([each for each in self.found if isinstance(each, CheckpointInfo)], self.foreign)
        return [each for each in self.found if isinstance(each, Skipped) or each in own]

    def meant(self, which: str) -> list[CheckpointInfo | Skipped]:
        """What a person means by a word, damaged or not: the last, the best, all of a step, or a checkpoint's name."""
        if which == LAST:
            meant = self.own()[-1:]
        elif which == BEST:
            infos = [each for each in self.own() if isinstance(each, CheckpointInfo)]
            meant = [best_among(infos, self.run.name, RunRecord.read(self.run).best)]
        else:
            meant = [each for each in self.found if which in (each.path.name, str(_step(each.path)))]
        if not meant:
            steps = sorted({_step(each.path) for each in self.found})
            there = f"There are those of steps {', '.join(map(str, steps))}" if steps else "It has no checkpoint at all"
            raise RunError(f"run {self.run.name} has no checkpoint '{which}': give a step, {LAST} or {BEST}. {there}")
        return meant

    def examined(self, found: CheckpointInfo | Skipped) -> Examined:
        if isinstance(found, Skipped):
            return Examined(found.path, 0, found.reason)
        try:
            self.folder.verify(found)
        except CheckpointError as error:
            return Examined(found.path, found.bytes, Skipped.of(found.path, error).reason)
        return Examined(found.path, found.bytes, "")

    def has_whole(self, found: Sequence[CheckpointInfo | Skipped]) -> bool:
        return any(not self.examined(each).problem for each in reversed(found))


def _step(path: Path) -> int:
    return (cursor_of(path.name) or Cursor()).step


class Format(StrEnum):
    """What kind of file."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_USUAL_NAMES = {Format.SAFETENSORS: "model.safetensors", Format.TORCH: "model.pt"}


@dataclass(frozen=True)
class Exported:
    """A file, and what is in it."""

    file: Path
    format: Format
    tensors: int
    bytes: int
    checkpoint: Path
    step: int
    weights_digest: str
    averaged: bool | None
    """Whether the parameters are their averages; None where the job keeps none."""


def export_model(
    run: RunFolder,
    out: Path,
    which: str,
    kind: Format | None,
    *,
    force: bool,
    averaged: bool | None = None,
    task: str | None = None,
) -> Exported:
    """Write the model of a checkpoint (last, best, or that of a step) to a file, or into a folder.

    It has the names of the model's own `state_dict`, each with a tensor of its own in a safetensors file, also where
    the model ties several to one; in a torch file those stay tied.
    `averaged`: the averages of its parameters, or the parameters themselves; None as the job evaluates.
    """
    kind = kind or (Format.TORCH if out.suffix in _TORCH_ENDINGS else Format.SAFETENSORS)
    file = out / _USUAL_NAMES[kind] if out.is_dir() else out
    if file.exists() and not force:
        raise RunError(f"{file} already exists. Choose another file, or replace it with --force")
    loaded = model_of(run, which, task, averaged=averaged)
    state: Mapping[str, Any] = loaded.model.state_dict()
    manifest = loaded.checkpoint.manifest
    if kind is Format.SAFETENSORS:
        write_weights(run, loaded, file)
    else:
        _write_file(file, lambda temporary: _save_torch(state, temporary))
    size = file.stat().st_size
    content = len(state), size, loaded.checkpoint.path, manifest.step, manifest.weights_digest, loaded.averaged
    return Exported(file, kind, *content)


def write_weights(run: RunFolder, loaded: LoadedModel, file: Path) -> None:
    """Write a model as safetensors, by the names of its `state_dict`; the file says which run and step it is of."""
    manifest = loaded.checkpoint.manifest
    labels = {"format": "pt", "run": run.name, "step": str(manifest.step), "weights": manifest.weights_digest}
    labels |= {} if loaded.averaged is None else {"averaged": str(loaded.averaged).lower()}
    _write_file(file, lambda temporary: _save_safetensors(loaded.model.state_dict(), temporary, labels))


def _write_file(file: Path, save: Callable[[Path], None]) -> None:
    """Whole or not at all."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        move_into_place(temporary, file)
    except FileExistsError as error:
        raise RunError(f"cannot write {file}: {error.filename} is a file, not a folder") from error
    except OSError as error:
        raise JobError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # its name may be one that no file can have
            discard(temporary)


def _save_safetensors(state: Mapping[str, Any], file: Path, labels: dict[str, str]) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    odd = next((name for name, value in state.items() if not isinstance(value, torch.Tensor)), None)
    if odd is not None:
        what = f"'{odd}' of the model's state_dict is {given(state[odd])}"
        raise RunError(f"{what}, and safetensors holds tensors only. Export with --format torch")
    # Each with memory of its own: the format knows no ties, and `load_state_dict` asks for every name.
    tensors = {name: value.detach().contiguous().clone() for name, value in state.items()}
    try:
        save_file(tensors, file, labels)
    except SafetensorError as error:
        if "os error" in str(error):  # what its own writer makes of a full disk
            raise OSError(0, str(error)) from error
        raise RunError(f"the model cannot be written as safetensors: {error}. Export with --format torch") from error


def _save_torch(state: Mapping[str, Any], file: Path) -> None:
    import torch

    copies: dict[tuple[Any, ...], Any] = {}

    def copied(value: Any) -> Any:
        """Without the rest of a larger memory that it is a view of, which would be written as well."""
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        return copies.setdefault(key, value.detach().clone())

    plain: OrderedDict[str, Any] = OrderedDict((name, copied(value)) for name, value in state.items())
    if hasattr(state, "_metadata"):  # versions of the modules, which some need to load
        plain._metadata = state._metadata  # type: ignore[attr-defined]
    try:
        torch.save(plain, file)
    except RuntimeError as error:  # what torch's own writer makes of a full disk
        raise OSError(0, str(error).partition("\n")[0]) from error
