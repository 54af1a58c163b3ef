"""A run with checkpoints that can be copied."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.saved_run import add_checkpoint, make_run
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.retention import Retention, Watched
from quorate.checkpoint.store import CheckpointFolder
from quorate.encryption.key import read_key
from quorate.spec.load import load_recorded
from quorate.spec.override import Override
from quorate.stores.place import FolderPlace
from quorate.stores.transfer import Source, copy_checkpoints


def make_source(runs: Path, *steps: int, keep: int = 3, numbers: int = 64, keys: str = "") -> Source:
    """A new run with checkpoints of these steps; `keys` are further ones of its job."""
    run = make_run(runs, *steps, numbers=numbers, keys=keys)
    return Source(run, Retention(keep), Watched("loss", "min"))


def save(source: Source, step: int, **about: Any) -> CheckpointInfo:
    """Add a checkpoint."""
    return add_checkpoint(source.run, step, **about)


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
