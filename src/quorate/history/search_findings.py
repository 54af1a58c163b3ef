"""What a search has found: the job of its best trial, as a file that trains it again, how much each key matters for its
metric, and what to type next."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.checkpoint.retention import is_number
from quorate.core.errors import QuorateError
from quorate.history.run_detail import Advice
from quorate.history.run_record import Status
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.observe.quantities import measure, plural
from quorate.spec.changes import chained
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.spec.search_load import trial_job
from quorate.storage.atomic import write_atomically


def job_of(record: SearchRecord, trial: TrialRecord) -> ResolvedJob:
    """The base job with the params of a trial, and what that was before as its lineage."""
    base = load_recorded(record.folder.job_file, {}, [])
    params = [*(ancestor.params for ancestor in trial.lineage), trial.params]
    jobs = [trial_job(base, each, trial.number) for each in params]
    return chained(jobs, [ancestor.until for ancestor in trial.lineage])


def best_job(record: SearchRecord) -> ResolvedJob | None:
    """That of the best trial; None where there is none yet, or the base cannot be read."""
    if record.best is None:
        return None
    try:
        return job_of(record, record.best)
    except QuorateError:
        return None


def write_best_job(record: SearchRecord) -> ResolvedJob | None:
    """Write `best-job.yaml`, with where each value came from: `quorate train` gives the digest of the best trial."""
    best, job = record.best, best_job(record)
    if best is None or job is None:
        return None
    found = ", ".join(
        f"{watched.metric} {measure(value)}" for watched, value in zip(record.objectives, best.values, strict=True)
    )
    lines = [f"# The best job of the search {record.name}: trial {best.number}, {found}."]
    if best.digest:
        lines.append(f"# Its weights have the digest {best.digest}; so has what this file trains.")
    # What is secret in the base job is in this one, too.
    mode = record.folder.job_file.stat().st_mode & 0o777
    write_atomically(record.folder.best_job_file, "\n".join([*lines, dump_job(job)]), mode)
    return job


def advise_on_search(record: SearchRecord, reference: str) -> Advice | None:
    """What to type next; `reference` names the search on a command line."""
    if record.status in (Status.LOST, Status.FAILED, Status.INTERRUPTED, Status.TERMINATED):
        ended = plural(sum(trial.has_ended for trial in record.trials), "trial")
        return Advice(
            f"quorate tune --resume {reference}",
            f"continues the search; what {ended} has done is not repeated",
        )
    if record.status is Status.COMPLETE and record.folder.best_job_file.is_file():
        return Advice(f"quorate train {record.folder.best_job_file}", "trains the best job again, to the same bits")
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


def importance_of(record: SearchRecord) -> Importance:
    """By all trials that have been evaluated: of those that were stopped, how far they came counts as well."""
    trials = record.ranked
    keys = [key for key in record.keys if len({repr(trial.params.get(key)) for trial in trials}) > 1]
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
