"""What a search has found: the job of its best trial, as a file that trains it again, how much each key matters for its
metric, what to type next, and all of it as a JSON document."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.core.errors import QuorateError
from quorate.history.run_detail import Advice
from quorate.history.run_record import Status
from quorate.observe.quantities import plural
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.storage.atomic import write_atomically
from quorate.tune.result import SearchResult
from quorate.tune.trials import Trial, TrialStatus


def job_of_best(result: SearchResult) -> ResolvedJob | None:
    """The job of the best trial; None where there is none yet, or the base cannot be read."""
    try:
        return None if result.best is None else result.best.resolved_job
    except QuorateError:
        return None


def write_best_job(result: SearchResult) -> ResolvedJob | None:
    """Write `best-job.yaml`, with where each value came from: `quorate train` gives the digest of the best trial."""
    best, job = result.best, job_of_best(result)
    if best is None or job is None:
        return None
    found = result.values_in_words(best)
    lines = [f"# The best job of the search {result.search}: trial {best.number}, {found}."]
    if best.weights_digest:
        lines.append(f"# Its weights have the digest {best.weights_digest}; so has what this file trains.")
    # What is secret in the base job is in this one, too.
    mode = result.files.job_file.stat().st_mode & 0o777
    write_atomically(result.best_job, "\n".join([*lines, dump_job(job)]), mode)
    return job


def advise_on_search(result: SearchResult, reference: str) -> Advice | None:
    """What to type next; `reference` names the search on a command line."""
    if result.status in (Status.LOST, Status.FAILED, Status.INTERRUPTED, Status.TERMINATED):
        ended = plural(result.ended, "trial")
        return Advice(
            f"quorate tune --resume {reference}",
            f"continues the search; what {ended} has done is not repeated",
        )
    if result.status is Status.COMPLETE and result.best_job.is_file():
        return Advice(f"quorate train {result.best_job}", "trains the best job again, to the same bits")
    return None


# --- the share of the ranking that each key explains by itself

FEWEST = 10
"""Trials from which on shares say something."""
ENOUGH = 30
"""Trials from which on they are more than a hint."""
METHOD = "the share of the ranking that each key explains by itself"
_GROUPS = 4


@dataclass(frozen=True)
class Importance:
    """Shares of the keys, the greatest first, and how they were found; or why nothing can be said."""

    shares: Mapping[str, float]
    method: str
    trials: int
    missing: str = ""


def importance_of(result: SearchResult) -> Importance:
    """By all trials that have been evaluated: of those that were stopped, how far they came counts as well."""
    trials = result.ranked
    keys = [key for key in result.keys if len({repr(trial.params.get(key)) for trial in trials}) > 1]
    if len(trials) < FEWEST:
        return Importance({}, "", len(trials), f"too few trials to tell: {len(trials)} of at least {FEWEST}")
    if not keys:
        return Importance({}, "", len(trials), "the trials do not differ in any key")
    # By its place among all: a single trial that has diverged must not decide.
    ranks = [float(place) for place in range(len(trials))]
    found = {key: explained([trial.params.get(key) for trial in trials], ranks) for key in keys}
    whole = sum(found.values())
    if not whole:
        return Importance({}, METHOD, len(trials), "no key explains which trials are better")
    shares = {key: found[key] / whole for key in sorted(keys, key=lambda key: -found[key])}
    return Importance(shares, METHOD if len(trials) >= ENOUGH else f"{METHOD}; so few are a hint only", len(trials))


def explained(values: Sequence[Any], ranks: Sequence[float]) -> float:
    """The share of the variance of ranks that lies between groups of values (epsilon squared, 0 to 1): numbers in
    quarters, other values each by itself. What chance alone would explain is taken off."""
    groups: dict[Any, list[float]] = {}
    for value, rank in zip(_grouped(values), ranks, strict=True):
        groups.setdefault(value, []).append(rank)
    count, mean = len(ranks), math.fsum(ranks) / len(ranks)
    total = math.fsum((rank - mean) ** 2 for rank in ranks)
    within = math.fsum((rank - math.fsum(group) / len(group)) ** 2 for group in groups.values() for rank in group)
    free = count - len(groups)
    if not total or free <= 0 or len(groups) < 2:
        return 0.0
    return max(0.0, (total - within - (len(groups) - 1) * within / free) / total)


def _grouped(values: Sequence[Any]) -> list[Any]:
    distinct = sorted({value for value in values if is_number(value)})
    if len(distinct) <= _GROUPS or not all(is_number(value) for value in values):
        return [repr(value) for value in values]
    in_order = sorted(values)
    edges = [in_order[len(values) * part // _GROUPS] for part in range(1, _GROUPS)]
    return [sum(value >= edge for edge in edges) for value in values]


# --- as JSON


def search_document(result: SearchResult, reference: str) -> dict[str, Any]:
    """Everything about a search, with all its trials in the order of their numbers; `reference` names it on a command
    line."""
    job, page, spec = result.best_job, result.report, result.spec
    importance, advice = importance_of(result), advise_on_search(result, reference)
    return search_summary(result) | {
        "best_job": str(job.absolute()) if job.is_file() else None,
        "report": str(page.absolute()) if page.is_file() else None,
        "algorithm": None if spec is None else spec.algorithm.model_dump(),
        "scheduler": None if spec is None else spec.scheduler.model_dump(),
        "space": {key: each.model_dump(exclude_none=True) for key, each in result.space.items()},
        "resumed": result.resumed,
        "front": [trial.number for trial in result.front] if len(result.objectives) > 1 else None,
        "importance": {
            "shares": dict(importance.shares),
            "method": importance.method or None,
            "trials": importance.trials,
            "missing": importance.missing or None,
        },
        "trials": [_trial(result, trial) for trial in result.trials],
        "problems": list(result.problems),
        "next": None if advice is None else asdict(advice),
    }


def search_summary(result: SearchResult) -> dict[str, Any]:
    """A search as a list of them has it."""
    best = result.best
    return {
        "search": result.search,
        "folder": str(result.folder.absolute()),
        "status": result.status.value,
        "reason": result.reason or None,
        "created": result.created.isoformat(timespec="milliseconds"),
        "objectives": [{"metric": each.metric, "mode": each.mode} for each in result.objectives],
        "best": None if best is None else _trial(result, best),
        "planned_trials": result.planned,
        "counts": {status.value: result.counts[status] for status in TrialStatus},
        "steps": result.steps,
        "saved_steps": result.saved_steps,
        "training_seconds": round(result.training_seconds, 3),
        "active_seconds": round(result.active_seconds, 3),
    }


def _trial(result: SearchResult, trial: Trial) -> dict[str, Any]:
    metrics = [watched.metric for watched in result.objectives]
    return {
        "trial": trial.number,
        "params": trial.params,
        "status": trial.status.value,
        "why": trial.reason or None,
        "run": trial.run_name or None,
        "folder": str(result.files.run(trial.run_name).path.absolute()) if trial.has_run else None,
        "node": trial.node or None,
        "values": dict(zip(metrics, trial.values, strict=True)) if trial.values else None,
        "best_step": trial.step,
        "metrics": trial.metrics,
        "curve": [list(point) for point in trial.curve],
        "steps": trial.steps,
        "total_steps": trial.total_steps,
        "seconds": None if trial.seconds is None else round(trial.seconds, 3),
        "weights_digest": trial.weights_digest or None,
        "lineage": [asdict(each) for each in trial.lineage],
    }
