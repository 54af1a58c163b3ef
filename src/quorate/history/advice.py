"""What to type next about a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from quorate.history.checkpoint_record import CheckpointRecord
from quorate.history.run_record import RunRecord
from quorate.history.status import Status
from quorate.spec.job import JobSpec

EARLY_STOP = "early stop"


@dataclass(frozen=True)
class Advice:
    """A command, if there is one to type, and what it is good for."""

    command: str | None
    purpose: str


def advise(
    record: RunRecord, spec: JobSpec | None, checkpoints: Sequence[CheckpointRecord], reference: str
) -> Advice | None:
    """What to type next; `reference` names the run on a command line. None where nothing is known to help."""
    resume = f"quorate resume {reference}"
    if record.status is Status.RUNNING:
        return _about_running(record)
    if record.status is Status.DAMAGED:
        return None
    if record.status is Status.COMPLETE:
        return _about_complete(record, spec, resume)
    newest = next((each for each in reversed(checkpoints) if not each.problem), None)
    if newest is None:
        return Advice(
            None,
            "nothing was saved to go on from: start it anew with quorate train; checkpoint.every saves on the way",
        )
    if record.failure is not None and record.failure.is_repeatable:
        # A changed task is another job, which a run does not turn into.
        return Advice(f"{resume} --branch", f"once it is mended, goes on from step {newest.step} in a new run")
    return Advice(resume, f"goes on from step {newest.step}")


def _about_running(record: RunRecord) -> Advice | None:
    if record.launcher is None or record.launcher.pid is None:
        return None
    return Advice(f"kill -INT {record.launcher.pid}", "stops it cleanly and leaves a checkpoint")


def _about_complete(record: RunRecord, spec: JobSpec | None, resume: str) -> Advice | None:
    if record.ending == EARLY_STOP:
        return Advice(f"{resume} --branch --set early_stop=null", "trains on without early_stop, in a new run")
    if spec is None:
        return None
    longer = f"--steps {2 * spec.steps}" if spec.steps else f"--epochs {2 * (spec.epochs or 1)}"
    return Advice(f"{resume} {longer}", "trains twice as long")
