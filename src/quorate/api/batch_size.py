"""`batch_size: auto`: the number is found before a run begins, by a job beside it that is thrown away."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quorate.api.tasks import TaskLocation
from quorate.coordinator.news import Outcome
from quorate.core.failure import JobFailed
from quorate.core.gpus import gpus_here
from quorate.core.machine import usable_cores
from quorate.engines.engine import Prepared
from quorate.observe.event import Event
from quorate.spec.device import kind_of, workers_here
from quorate.spec.job import JobSpec
from quorate.spec.resolved import ResolvedJob
from quorate.spec.rules import checked_job
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch
from quorate.training.run_mode import MICRO_BATCH, RunMode

ORIGIN = "auto: the largest that fits"

Run = Callable[[Launch, Callable[[Event], None], Callable[[Prepared], None]], Outcome]
"""Runs a job to its end: shows its events, and has the machine and the task accepted first."""


def with_batch_found(resolved: ResolvedJob, place: TaskLocation, run: Run, signals: Signals) -> tuple[ResolvedJob, str]:
    """The job with a number for `batch_size: auto`, and what to tell of it.

    Memory is needed for one micro-batch at a time, whoever hosts its lane; so that is what is tried, and the batch is
    as many of them as a step has.
    """
    spec = resolved.spec
    each = spec.lanes * spec.accumulate
    tried = spec.model_copy(update={"batch_size": each, "port": 0, "workers": 1, "min_workers": 1, "spares": 0})
    tried = tried.model_copy(update={"track": None, "notify": None, "loader_workers": 0})
    with tempfile.TemporaryDirectory(prefix="quorate-batch-") as scratch:
        folder = RunFolder.create(Path(scratch), spec.name)
        mode = RunMode(batch_for=_sharing(spec))
        launch = Launch(folder, tried, 1, resolved.source, None, mode, place.reference, place.search_path)
        outcome = run(launch, lambda _: None, lambda _: None)
    if outcome.failure is not None:
        raise outcome.failure.error()
    if outcome.result["ending"] == signals.reason:
        raise JobFailed(signals.failure(f"{signals.reason}; no run was begun."))
    samples = int(outcome.result["final_metrics"][MICRO_BATCH])
    number = samples * each
    found = checked_job(spec.model_dump() | {"batch_size": number})
    parts = f" in {spec.accumulate} micro-batches" if spec.accumulate > 1 else ""
    told = f"batch_size: auto is {number:,}: {samples:,} samples at a time, in each of {spec.lanes} lanes{parts}"
    return replace(resolved, spec=found, origins=resolved.origins | {"batch_size": ORIGIN}), told


def _sharing(spec: JobSpec) -> int:
    """How many workers, and on GPUs servers, have one device's memory between them."""
    workers = workers_here(spec, usable_cores())
    if kind_of(spec) == "cpu":
        return workers
    return -(-(workers + spec.strategy.server_count) // max(1, len(gpus_here())))
