"""A run with checkpoints that can be copied."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.whole_save import save_whole
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.retention import Retention, Watched
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.generation import Phase
from quorate.encryption.key import read_key
from quorate.spec.load import load_recorded
from quorate.spec.override import Override
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder
from quorate.stores.place import FolderPlace
from quorate.stores.transfer import Source, copy_checkpoints


def make_source(runs: Path, *steps: int, keep: int = 3, numbers: int = 64, keys: str = "") -> Source:
    """A new run with checkpoints of these steps; `keys` are further ones of its job."""
    run = RunFolder.create(runs, "tiny")
    run.write_job(f"task: task.py:Tiny\nbatch_size: 8\nsteps: 8\n{keys}")
    run.write_job(dump_job(load_recorded(run.job_file, {}, [])))  # as a run has it
    run.write_environment({"torch": "2"})
    source = Source(run, Retention(keep), Watched("loss", "min"))
    for step in steps:
        save(source, step, numbers=numbers)
    return source


def save(
    source: Source,
    step: int,
    *,
    loss: float | None = None,
    numbers: int = 64,
    folder: CheckpointFolder | None = None,
    environment: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
) -> CheckpointInfo:
    """Add a checkpoint; with a loss, it was evaluated."""
    folder = folder or CheckpointFolder(source.run.checkpoints)
    state: dict[str, Any] = {"model": {"weight": torch.arange(float(numbers)) * step}, "epoch": step}
    save_whole(
        folder,
        state,
        step=step,
        phase=int(Phase.TRAINED if loss is None else Phase.EVALUATED),
        weights_digest=f"weights of {step}",
        job=job or {"seed": 7},
        environment=environment or {"torch": "2"},
        metrics={} if loss is None else {"loss": loss},
    )
    return folder.list()[-1]


def infos(source: Source) -> dict[str, CheckpointInfo]:
    """Its checkpoints by name."""
    return {info.path.name: info for info in CheckpointFolder(source.run.checkpoints).list()}


class Encrypted:
    """An encrypted run with copies, and what somebody without the key does to them."""

    def __init__(self, tmp_path: Path, source_digest: str = "") -> None:
        self.key = tmp_path / "key"
        self.key.write_text("ab" * 32)
        self.place = {"key_file": str(self.key), "key_env": None}
        keys = f"checkpoint: {{encrypt: {{key_file: {self.key}}}}}\n"
        self.source = replace(make_source(tmp_path / "runs", keys=keys), with_source=False)
        self.folder = CheckpointFolder(self.source.run.checkpoints, cipher=read_key(self.place))
        self.job = load_recorded(self.source.run.job_file, {}, []).spec.model_dump(mode="json")
        for step in (2, 4):
            save(self.source, step, folder=self.folder, environment={"task source": source_digest}, job=self.job)
        self.asked = [Override("checkpoint.encrypt", {"key_file": str(self.key)}, "--set checkpoint.encrypt")]
        self.copy = tmp_path / "backup" / self.source.run.name
        self.copy.parent.mkdir()
        copy_checkpoints(self.source, FolderPlace(self.copy))
        self._elsewhere = tmp_path / "elsewhere-planted"

    def plant(self, step: int, folder: Path) -> str:
        """Put a plain checkpoint of somebody else into a folder."""
        path = save(make_source(self._elsewhere), step).path
        shutil.copytree(path, folder / path.name)
        return path.name
