"""Every death, silence and broken link in one sentence: who, where, at which step, doing what, and what happened."""

from quorate.coordinator.events import ExitReported
from quorate.coordinator.states import Enrolled, JobSettings
from quorate.core.errors import ResidualsLost, SettingsDiffer
from quorate.core.failure import Failure
from quorate.core.generation import ENDED_FOR_A_STOP, GAVE_UP, LOST_WITH_ITS_HOST, WorkerStatus, name_of
from quorate.core.processes import describe_departure, likely_cause
from quorate.observe.events import LogMessage, WorkerLost

WORKER_LOST = "WorkerLost"
LAUNCHER_GONE = "LauncherGone"


def name_worker(worker: int, pid: int, host: str) -> str:
    """A worker as a sentence names it."""
    return f"{name_of(worker)} (pid {pid}{f' on host {host}' if host else ''})"


def name_enrolled(known: Enrolled) -> str:
    """A registered worker as a sentence names it."""
    return name_worker(known.worker, known.registration.pid, known.registration.host)


def warning(message: str, step: int, now: float) -> LogMessage:
    """What somebody may want to look at."""
    return LogMessage(step=step, time=now, level="warning", message=message)


def loss_of(failure: Failure, detect: float, now: float) -> WorkerLost:
    """That a worker is gone, `detect` seconds after the first sign of it, and the job goes on."""
    return WorkerLost(
        step=failure.step,
        time=now,
        worker=failure.worker,
        cause=failure.kind,
        message=failure.message,
        phase=failure.phase,
        detect_s=round(detect, 4),
    )


def autopsy_of_exit(
    exit_report: ExitReported, known: Enrolled | None, last_words: str = "", *, had_joined: bool = False
) -> Failure:
    """Why a process that is gone counts as a failure. Who is not known may have joined an earlier coordinator."""
    # What is further on; of two at the same step what was told of its end, which is the later word.
    known_of = (exit_report.status, known.status) if known else (exit_report.status,)
    status = max(known_of, key=lambda status: (-1 if status.step is None else status.step, bool(status.phase)))
    host = exit_report.host or (known.registration.host if known else "")
    who = name_worker(exit_report.worker, exit_report.pid, host)
    where = f" at step {status.step}" if status.step is not None else ""
    where += f" while in {status.phase}" if status.phase else ""
    where += "" if known or had_joined else " before it had joined the job"
    what, hint = what_happened(exit_report)
    if last_words and exit_report.exit_code == GAVE_UP:
        return _lost(f"{who} {what}{where}: {last_words}", exit_report.worker, status)
    if last_words:
        hint = f" Its last message: {last_words}"
    return _lost(f"{who} {what}{where}.{hint}", exit_report.worker, status)


def autopsy_of_silence(known: Enrolled, now: float, settings: JobSettings) -> Failure:
    """Why a worker that says nothing counts as lost."""
    timeout = settings.timing.failure_timeout
    step = f"step {known.status.step}" if known.status.step is not None else ""
    seen = ", ".join(filter(None, (step, known.status.phase)))
    message = (
        f"{name_enrolled(known)} has sent no heartbeat for {now - known.heard:.1f} s (failure_timeout: {timeout});"
        f" last seen {f'at {seen}' if seen else 'when it registered'}."
    )
    return _lost(message, known.worker, known.status)


def autopsy_of_futility(failure: Failure, deaths: int, here: int, settings: JobSettings) -> Failure:
    """What to say when workers die again and again and nothing comes of it."""
    least = settings.least_workers
    needed = f" ({here} are left, and min_workers is {least})" if here < least > 1 else ""
    message = (
        f"{failure.message.rstrip()} It is the last of {deaths} workers that were lost without a completed step in"
        f" between{needed}, so the job is stopped."
    )
    return failure.at(message=message)


def autopsy_of_divergence(failure: Failure, process: tuple[int, int], known: Enrolled | None) -> Failure:
    """Why a worker is replaced whose replica differs, or may be the one that does. One that has not come back to a new
    coordinator is not known."""
    who, status = (name_worker(*process, ""), WorkerStatus()) if known is None else (name_enrolled(known), known.status)
    if failure.kind == ResidualsLost.__name__:
        message = (
            f"{who} cannot continue: {failure.message} All workers are replaced and go back to the newest checkpoint."
        )
        return Failure(failure.kind, message, worker=process[0], step=status.step, phase=status.phase)
    verdict = "holds wrong bits" if failure.culprits else "may hold wrong bits"
    cause = ", as bad memory or a bad processor makes them"
    if failure.kind == SettingsDiffer.__name__:
        verdict = "has other settings than the others" if failure.culprits else "may have wrong settings"
        cause = ", as code makes them that depends on the worker"
    message = (
        f"{who} {verdict}{cause}: {failure.message} All workers are replaced and go back to the newest checkpoint."
    )
    return Failure(failure.kind, message, worker=process[0], step=status.step, phase=status.phase)


def autopsy_of_divergences(failure: Failure, times: int) -> Failure:
    """What to say of replicas that differ again and again."""
    message = (
        f"{failure.message} That was the {times}th time in a row without any progress, so the job is given up. Either"
        " the processor or the memory of a machine is faulty, or something in the task's optimizer depends on the"
        " worker: the time, a generator of its own, a file that changes."
    )
    return failure.at(message=message)


def autopsy_of_links(failure: Failure, times: int, seconds: float) -> Failure:
    """What to say of links that break again and again although nobody is dead."""
    message = (
        f"links between the workers broke {times} times in a row, for {seconds:.0f} s, without a completed step, and no"
        f" process was found dead: {failure.message.rstrip('.')}."
    )
    return failure.at(message=message)


def autopsy_of_no_return(worker: int, pid: int, settings: JobSettings) -> Failure:
    """What to say of a worker that a new coordinator never heard of."""
    message = (
        f"{name_of(worker)} (pid {pid}) did not come back within {settings.timing.failure_timeout:.1f} s after the"
        " coordinator was replaced: it hangs, or is cut off."
    )
    return _lost(message, worker, WorkerStatus())


def autopsy_of_launcher() -> Failure:
    """What to say when nobody is left to look after the workers."""
    return Failure(LAUNCHER_GONE, "the launcher of the job has ended without stopping it.")


def _lost(message: str, worker: int, status: WorkerStatus) -> Failure:
    return Failure(WORKER_LOST, message, worker=worker, step=status.step, phase=status.phase)


def what_happened(exit_report: ExitReported) -> tuple[str, str]:
    """How a process has ended, and what may have been the cause."""
    if exit_report.signal is not None:
        return describe_departure(-exit_report.signal), likely_cause(-exit_report.signal)
    if exit_report.exit_code == 0:
        return "exited before the job was complete (code 0)", " Does the task call sys.exit()?"
    if exit_report.exit_code == LOST_WITH_ITS_HOST:
        return "was lost with its host", ""
    if exit_report.exit_code == ENDED_FOR_A_STOP:
        return "was stopped (SIGSTOP), and ended for that by the launcher,", ""
    hint = " Its log in the run folder may say why."
    if exit_report.exit_code == GAVE_UP:
        return "gave up", hint
    return f"exited with code {exit_report.exit_code}", hint
