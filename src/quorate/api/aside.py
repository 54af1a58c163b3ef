"""Running a job's code beside its run: in a folder that is thrown away, so that the run stays as it is."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quorate.api.task_place import TaskPlace
from quorate.checkpoint.listing import CheckpointInfo
from quorate.core.cores import usable_cores
from quorate.core.errors import CheckpointError
from quorate.core.failure import JobFailed
from quorate.engines.engine import Prepared
from quorate.engines.local import LocalEngine
from quorate.observe.event import Event
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import listening_to_signals
from quorate.supervisor.supervisor import Launch, Supervisor
from quorate.training.run_mode import RunMode


@dataclass(frozen=True)
class Aside:
    """A job to be run beside its run. `accept` refuses a machine or a task that does not fit."""

    resolved: ResolvedJob
    mode: RunMode
    checkpoint: Path | None
    accept: Callable[[Prepared], None]
    place: TaskPlace


def held(run: RunFolder, info: CheckpointInfo, scratch: Path) -> Path:
    """Where a checkpoint of a run can be read for as long as it takes: a job that is under way prunes its own."""
    if run.holder() is None:
        return info.path
    safe = scratch / "held" / info.path.name
    safe.mkdir(parents=True)
    try:
        for file in info.path.iterdir():
            _link_or_copy(file, safe / file.name)
    except FileNotFoundError as error:
        shutil.rmtree(safe)
        raise CheckpointError(
            f"checkpoint {info.path.name} of run {run.name} was removed by the running job, which keeps the last "
            "`checkpoint.keep`. Try again"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot copy checkpoint {info.path.name} of run {run.name}, which is running, to {scratch}: "
            f"{error.strerror or error}. Choose another folder with TMPDIR, or wait for the run's end"
        ) from error
    return safe


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def run_aside(aside: Aside, scratch: Path) -> tuple[RunFolder, dict[str, Any]]:
    """Run it in a folder below `scratch`; that folder and its result. An interruption raises `JobFailed` too."""
    # Its recorded port may be in use: by the very run that it stands beside.
    spec = aside.resolved.spec.model_copy(update={"port": 0})
    workers = spec.worker_count(usable_cores())
    with listening_to_signals() as signals:
        run = RunFolder.create(scratch, spec.name)
        launch = Launch(run, spec, workers, aside.resolved.source, aside.checkpoint, aside.mode)
        launch = replace(launch, task=aside.place.reference, search_path=aside.place.search_path)
        engine = LocalEngine(run, launch.preparation)
        outcome = Supervisor(engine, launch, _show_nothing, aside.accept, signals).run()
    if outcome.failure is not None:
        raise outcome.failure.error()
    if outcome.result["ending"] == signals.reason:  # before there was a worker to be stopped
        raise JobFailed(signals.failure(f"{signals.reason}; the run is as it was."))
    return run, outcome.result


def _show_nothing(_: Event) -> None:
    pass
