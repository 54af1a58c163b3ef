"""A job under faults beside the same job undisturbed."""

import signal
from dataclasses import dataclass
from pathlib import Path

from quorate.api import session
from quorate.api.part import Part, play_apart
from quorate.api.result import Result, open_run
from quorate.core.cores import usable_cores
from quorate.core.errors import RunError
from quorate.core.failure import Failure, JobFailed
from quorate.core.fault import Fault, Whom
from quorate.observe.sinks import Sink
from quorate.spec.change import changes
from quorate.spec.load import load_recorded
from quorate.spec.marks import Mark
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.worker.faults import Firing, firings


@dataclass(frozen=True)
class Trial:
    """What became of a job under faults. With a failure it has not ended, and there is nothing to compare."""

    undisturbed: Result
    disturbed: Result
    failure: Failure | None
    faults: tuple[Fault, ...]
    firings: tuple[Firing, ...]
    differing_facts: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether both runs have ended with the same weights."""
        return self.failure is None and self.disturbed.weights_digest == self.undisturbed.weights_digest

    @property
    def have_all_fired(self) -> bool:
        """Whether every fault came about: otherwise nothing is shown."""
        return {firing.fault for firing in self.firings} == set(range(len(self.faults)))


def worker_count(resolved: ResolvedJob) -> int:
    """On how many workers a job runs here."""
    return resolved.spec.worker_count(usable_cores())


def reference(run: str, resolved: ResolvedJob) -> Result:
    """A complete run of the same job, to compare with."""
    result = open_run(run, resolved.spec.runs)
    if result.status != "complete":
        raise RunError(
            f"run {result.run} is {result.status}, so there is nothing to compare with. Name a complete run, or leave "
            "out --against: then the job is run undisturbed first."
        )
    recorded = load_recorded(RunFolder(result.folder).job_file, {}, []).spec
    changed = [change for change in changes(recorded, resolved.spec) if change.mark is Mark.MEANING]
    if changed:
        raise RunError(
            f"run {result.run} means something else than this job: {'; '.join(map(str, changed))}. Name a run of the "
            "same job, or leave out --against: then the job is run undisturbed first."
        )
    return result


def try_under(faults: tuple[Fault, ...], resolved: ResolvedJob, undisturbed: Result, watch: session.Watch) -> Trial:
    """Run a job under faults in a run folder of its own. Raises what stops it, but not what the faults have led to."""
    run_under = _run_apart if any(fault.whom is Whom.LAUNCHER for fault in faults) else _run
    disturbed, failure = run_under(faults, resolved, watch)
    run = RunFolder(disturbed.folder)
    return Trial(
        undisturbed=undisturbed,
        disturbed=disturbed,
        failure=failure,
        faults=faults,
        firings=tuple(firings(run.logs)),
        differing_facts=_differing_facts(undisturbed.folder, run),
    )


def _run(faults: tuple[Fault, ...], resolved: ResolvedJob, watch: session.Watch) -> tuple[Result, Failure | None]:
    begun: list[RunFolder] = []

    def look(beginning: session.Begun) -> Sink:
        begun.append(beginning.run)
        return watch(beginning)

    try:
        return session.start(resolved, look, faults), None
    except JobFailed as error:
        if error.exit_code != JobFailed.exit_code or not begun:
            raise
        return open_run(begun[0].path), error.failure


def _run_apart(faults: tuple[Fault, ...], resolved: ResolvedJob, watch: session.Watch) -> tuple[Result, Failure | None]:
    """With launchers that are killed: each time the run is taken up again, as somebody would who finds it dead."""
    ending = play_apart(Part(resolved, faults, watch))
    for _ in range(sum(fault.whom is Whom.LAUNCHER for fault in faults)):
        if ending.run is not None and ending.code == -signal.SIGKILL:
            ending = play_apart(Part(resolved, faults, watch, ending.run.path))
    if ending.run is None:
        raise RunError("the job could not be started; what is wrong was told above.")
    result = open_run(ending.run.path)
    told = result.fields.get("failure")
    if told is None and ending.code != 0:
        message = f"the job was not taken up again (code {ending.code}): see what was told above."
        return result, Failure("JobError", message)
    return result, None if told is None else Failure.from_dict(told)


def _differing_facts(undisturbed: Path, run: RunFolder) -> tuple[str, ...]:
    """What the bits depend on, and is not the same for both: the task's source, a version of a library."""
    before, after = RunFolder(undisturbed).read_environment() or {}, run.read_environment() or {}
    return tuple(name for name, value in before.items() if name in after and after[name] != value)
