"""A run's model as a file that PyTorch reads without Quorate."""

import contextlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.api.result import model_of
from quorate.core.errors import JobError, RunError
from quorate.core.user_code import given
from quorate.storage.atomic import discard, move_into_place
from quorate.storage.run_folder import RunFolder


class Format(StrEnum):
    """What kind of file."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_USUAL_NAMES = {Format.SAFETENSORS: "model.safetensors", Format.TORCH: "model.pt"}
_TORCH_ENDINGS = {".pt", ".pth", ".bin", ".ckpt"}


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
        raise RunError(f"{file} is there already. Choose another file, or replace it with --force")
    loaded = model_of(run, which, task, averaged=averaged)
    state: Mapping[str, Any] = loaded.model.state_dict()
    manifest = loaded.checkpoint.manifest
    if kind is Format.SAFETENSORS:
        labels = {"format": "pt", "run": run.name, "step": str(manifest.step), "weights": manifest.weights_digest}
        labels |= {} if loaded.averaged is None else {"averaged": str(loaded.averaged).lower()}
        _write(file, lambda temporary: _save_safetensors(state, temporary, labels))
    else:
        _write(file, lambda temporary: _save_torch(state, temporary))
    size = file.stat().st_size
    content = len(state), size, loaded.checkpoint.path, manifest.step, manifest.weights_digest, loaded.averaged
    return Exported(file, kind, *content)


def _write(file: Path, save: Callable[[Path], None]) -> None:
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
