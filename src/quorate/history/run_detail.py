"""Everything about one run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quorate.core.cores import usable_cores
from quorate.core.errors import QuorateError
from quorate.core.task_source import TaskSource
from quorate.core.timing import Timing
from quorate.history.checkpoint_record import CheckpointRecord, read_checkpoints
from quorate.history.curve import is_loss
from quorate.history.pace import tells_pace
from quorate.history.run_record import RunRecord
from quorate.history.timeline import Timeline
from quorate.observe.data_knobs import Knobs
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob
from quorate.storage.kept_source import read_source
from quorate.storage.run_folder import RunFolder

Read = TypeVar("Read")


@dataclass(frozen=True)
class RunDetail:
    """A run with its job, its events, its checkpoints, and what its bits depend on.

    `job` is None where the recorded job cannot be read by this version. `problems` are what could not be read, beside
    what the record says already.
    `address` is where the coordinator of a run that is under way listens, for its owner.
    """

    record: RunRecord
    timeline: Timeline
    job: ResolvedJob | None
    environment: dict[str, str]
    checkpoints: tuple[CheckpointRecord, ...]
    address: str | None
    problems: tuple[str, ...]
    source: TaskSource | None = None

    @classmethod
    def read(cls, run: RunFolder) -> "RunDetail":
        """From a run's folder, whatever state that is in."""
        problems: dict[Path, str] = {}

        def attempt(file: Path, read: Callable[[], Read]) -> Read | None:
            try:
                return read()
            except QuorateError as error:
                problems[file] = error.message
                return None

        timeline = attempt(run.events_file, lambda: Timeline.read(run.events_file, keep=_is_shown))
        job = attempt(run.job_file, lambda: load_recorded(run.job_file, {}, []))
        environment = attempt(run.environment_file, run.read_environment) or {}
        checkpoints = read_checkpoints(run.checkpoints)
        kept = read_source(run.path)
        record = RunRecord.read(run, timeline)
        return cls(
            record=record,
            timeline=timeline or Timeline(),
            job=job,
            environment=_from_workers(checkpoints) | {name: str(value) for name, value in environment.items()},
            checkpoints=checkpoints,
            address=run.read_address(),
            problems=tuple(problem for file, problem in problems.items() if str(file) not in record.reason),
            source=None if kept is None else kept.source,
        )

    @property
    def timing(self) -> Timing | None:
        """Every timeout of the run."""
        return None if self.job is None else Timing(self.job.spec.failure_timeout)

    @property
    def advice_on_waiting(self) -> str | None:
        """Which knobs may shorten the waiting for data; None where nothing is to be gained, or the job is not known."""
        if self.job is None or not self.timeline.waiting.is_worth_telling:
            return None
        begun = self.timeline.of_kind("run")
        data = begun[-1].fields.get("data") if begun else None
        return Knobs.of(self.job.spec, data, self.record.workers, usable_cores()).advice


def _is_shown(field: str) -> bool:
    return is_loss(field) or tells_pace(field)


def _from_workers(checkpoints: tuple[CheckpointRecord, ...]) -> dict[str, str]:
    """What only the workers can know, such as the canary and the dataset's fingerprint, stands in the checkpoints."""
    return dict(next((each.environment for each in reversed(checkpoints) if each.environment), ()))
