"""The job of a search's best trial, as a file that trains it again, and what to type next about a search."""

from quorate.core.errors import QuorateError
from quorate.history.run_detail import Advice
from quorate.history.run_record import Status
from quorate.history.search_record import SearchRecord, TrialRecord
from quorate.observe.quantities import measure, plural
from quorate.spec.lineage import chained
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
