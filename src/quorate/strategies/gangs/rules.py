"""What must hold between the keys of gangs, and between them and the number of workers."""

from collections.abc import Iterator

from quorate.core.errors import Problem
from quorate.spec.job import JobSpec
from quorate.spec.options import Rules, Said
from quorate.strategies.gangs.option import FsdpSpec


def _workers_fill_mesh(job: JobSpec, said: Said) -> Iterator[Problem]:
    """A sharded gang is there in full, or not at all."""
    strategy, workers, lanes = job.strategy, job.workers, job.lanes
    if not isinstance(strategy, FsdpSpec):
        return
    there, across = said("strategy"), strategy.replicate * strategy.tensor
    if not isinstance(workers, int):
        yield Problem("workers", f"strategy: fsdp{there} needs a fixed number of workers", "Write workers: 4.")
        return
    if workers % across or (strategy.shard is not None and workers != across * strategy.shard):
        parts = {key: getattr(strategy, key) for key in ("replicate", "shard", "tensor")}
        given = [f"{key} {value}" for key, value in parts.items() if key in strategy.model_fields_set and value]
        yield Problem(
            "workers",
            f"{workers} workers{said('workers')} are not the {' × '.join(given)}{there} of the mesh",
            f"Use workers: {across * (strategy.shard or 1)}, or another mesh.",
        )
        return
    groups = workers // strategy.tensor
    if lanes % groups:
        yield Problem(
            "lanes",
            f"{lanes} lanes{said('lanes')} cannot be shared evenly by {groups} groups of workers{there}, which compute "
            f"in step: {lanes} is not a multiple of {groups}",
            f"Use lanes: {-(-lanes // groups) * groups} (which changes what the job computes), or another mesh.",
        )
    if job.min_workers not in (1, workers):
        hint = "Leave min_workers out."
        yield Problem("min_workers", f"strategy: fsdp{there} trains with all {workers} workers, or not at all", hint)


def _workers_take_turns(job: JobSpec, said: Said) -> Iterator[Problem]:
    """With synchronized batch norm all workers make the same number of passes."""
    workers, lanes = job.workers, job.lanes
    if not job.strategy.couples_passes:
        return
    what = f"strategy.sync_batch_norm{said('strategy.sync_batch_norm')}"
    if not isinstance(workers, int):
        yield Problem("workers", f"{what} needs a fixed number of workers", "Write workers: 4.")
        return
    if lanes % workers:
        yield Problem(
            "workers",
            f"{workers} workers{said('workers')} do not have equal numbers of the {lanes} lanes{said('lanes')}, which "
            f"{what} needs: {lanes} = {lanes // workers} × {workers} + {lanes % workers}",
            "Use a number of workers that divides lanes.",
        )
    if job.min_workers != workers:
        yield Problem(
            "min_workers",
            f"with {what}, {job.min_workers}{said('min_workers')} of {workers} workers would normalize by the "
            "statistics of other samples",
            f"Write min_workers: {workers}.",
        )
    for key, value in (("balance", "speed"), ("last_batch", "keep"), ("on_bad_sample", "skip")):
        if getattr(job, key) == value:
            text = f"{value}{said(key)} lets workers make different numbers of passes, in which {what} needs them all"
            yield Problem(key, text, f"Leave {key} out, or sync_batch_norm.")


RULES: Rules = {
    _workers_fill_mesh: frozenset({"strategy", "workers", "lanes", "min_workers"}),
    _workers_take_turns: frozenset(
        {"strategy", "workers", "lanes", "min_workers", "balance", "last_batch", "on_bad_sample"}
    ),
}
