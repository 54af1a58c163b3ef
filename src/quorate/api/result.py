"""What a finished job leaves behind."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import RunError
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Result:
    """How a run ended. `metrics` are those of the last evaluation."""

    run: str
    folder: Path
    status: str
    steps: int
    metrics: dict[str, float]
    weights_digest: str
    samples_per_second: float
    wall_seconds: float
    fields: dict[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, run: RunFolder, fields: dict[str, Any]) -> "Result":
        """From the content of `result.json`."""
        return cls(
            run=run.name,
            folder=run.path,
            status=fields["status"],
            steps=fields["steps"],
            metrics=fields["final_metrics"],
            weights_digest=fields["weights_digest"],
            samples_per_second=fields["samples_per_second"],
            wall_seconds=fields["wall_seconds"],
            fields=fields,
        )

    @property
    def exit_code(self) -> int:
        """What the command line ends with."""
        return {"interrupted": 130, "terminated": 143}.get(self.status, 0)

    def load_model(self) -> Any:
        """The trained model, from the run's newest checkpoint. The caller's random generators are left as they are."""
        from quorate.data.streams import preserved_generators
        from quorate.training.params import configure
        from quorate.training.replica import Replica
        from quorate.training.source import load_task_type

        run = RunFolder(self.folder)
        info = CheckpointFolder(run.checkpoints).newest_whole()
        if info is None:
            raise RunError(f"run {self.run} has no checkpoint to load a model from")
        spec = load_recorded(run.job_file, {}, []).spec
        with preserved_generators():
            task_type = load_task_type(spec.task, spec.seed)
            replica = Replica(configure(task_type, spec.params, str(run.job_file), spec.seed), spec)
        replica.load(CheckpointFolder(run.checkpoints).load(info).state["replica"])
        return replica.model
