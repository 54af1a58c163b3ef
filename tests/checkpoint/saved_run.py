"""A run with checkpoints that nobody trained."""

from pathlib import Path
from typing import Any

import torch

from checkpoint.whole_save import save_whole
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.generation import Phase
from quorate.spec.load import load_recorded
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder


def make_run(runs: Path, *steps: int, numbers: int = 64, keys: str = "") -> RunFolder:
    """A new run with checkpoints of these steps; `keys` are further ones of its job."""
    run = RunFolder.create(runs, "tiny")
    run.write_job(f"task: task.py:Tiny\nbatch_size: 8\nsteps: 8\n{keys}")
    run.write_job(dump_job(load_recorded(run.job_file, {}, [])))  # as a run has it
    run.write_environment({"torch": "2"})
    for step in steps:
        add_checkpoint(run, step, numbers=numbers)
    return run


def add_checkpoint(
    run: RunFolder,
    step: int,
    *,
    loss: float | None = None,
    numbers: int = 64,
    folder: CheckpointFolder | None = None,
    environment: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
) -> CheckpointInfo:
    """With a loss, it was evaluated."""
    folder = folder or CheckpointFolder(run.checkpoints)
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
