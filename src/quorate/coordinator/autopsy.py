"""Every death, silence and broken link in one sentence: who, where, at which step, doing what, and what happened."""

from quorate.coordinator.events import ExitReported, Place
from quorate.coordinator.states import Enrolled
from quorate.coordinator.terms import Terms
from quorate.core.failure import Failure
from quorate.core.processes import describe_departure, likely_cause
from quorate.core.worker_status import GAVE_UP

WORKER_LOST = "WorkerLost"
LAUNCHER_GONE = "LauncherGone"


def name_worker(worker: int, pid: int, host: str) -> str:
    """A worker as a sentence names it."""
    return f"worker {worker} (pid {pid}{f' on host {host}' if host else ''})"


def name_enrolled(known: Enrolled) -> str:
    """A registered worker as a sentence names it."""
    return name_worker(known.worker, known.registration.pid, known.registration.host)


def most_advanced(left: Place, right: Place) -> Place:
    """The place that is further on; of two at the same step the second, which is the later word."""
    return max(right, left, key=_progress)


def autopsy_of_exit(
    exit_report: ExitReported, known: Enrolled | None, last_words: str = "", *, had_joined: bool = False
) -> Failure:
    """Why a process that is gone counts as a failure. Who is not known may have joined an earlier coordinator."""
    place = most_advanced(known.place, exit_report.place) if known else exit_report.place
    host = exit_report.host or (known.registration.host if known else "")
    who = name_worker(exit_report.worker, exit_report.pid, host)
    where = _where(place) if known or had_joined else f"{_where(place)} before it had joined the job"
    what, hint = what_happened(exit_report)
    if last_words and exit_report.exit_code == GAVE_UP:
        return _lost(f"{who} {what}{where}: {last_words}", exit_report.worker, place)
    if last_words:
        hint = f" Its last words: {last_words}"
    return _lost(f"{who} {what}{where}.{hint}", exit_report.worker, place)


def autopsy_of_silence(known: Enrolled, now: float, terms: Terms) -> Failure:
    """Why a worker that says nothing counts as lost."""
    timeout = terms.timing.failure_timeout
    last_word = ", ".join(_words(known.place)) or "its registration"
    message = (
        f"{name_enrolled(known)} has not been heard for {now - known.heard:.1f} s (failure_timeout: {timeout});"
        f" its last word was {last_word}."
    )
    return _lost(message, known.worker, known.place)


def autopsy_of_futility(failure: Failure, deaths: int, here: int, terms: Terms) -> Failure:
    """What to say when workers die again and again and nothing comes of it."""
    needed = f" ({here} are left, and min_workers is {terms.min_workers})" if here < terms.min_workers > 1 else ""
    message = (
        f"{failure.message.rstrip()} It is the last of {deaths} workers that were lost without a completed step in"
        f" between{needed}, so the job is given up."
    )
    return failure.at(message=message)


def autopsy_of_divergence(failure: Failure, process: tuple[int, int], known: Enrolled | None) -> Failure:
    """Why a worker is replaced whose replica differs, or may be the one that does. One that has not come back to a new
    coordinator is not known."""
    who, place = (name_worker(*process, ""), Place()) if known is None else (name_enrolled(known), known.place)
    verdict = "holds wrong bits" if failure.culprits else "may hold wrong bits"
    message = (
        f"{who} {verdict}, as bad memory or a bad processor makes them: {failure.message} All workers"
        " are replaced and go back to the newest checkpoint."
    )
    return Failure(failure.kind, message, worker=process[0], step=place.step, phase=place.phase)


def autopsy_of_divergences(failure: Failure, times: int) -> Failure:
    """What to say of replicas that differ again and again."""
    message = (
        f"{failure.message} That was the {times}th time in a row without the job getting any further, so the job is"
        " given up. Either a machine computes or remembers wrongly, or something in the task's optimizer depends on the"
        " worker: the time, a generator of its own, a file that changes. `quorate resume` goes on from the newest"
        " checkpoint."
    )
    return failure.at(message=message)


def autopsy_of_links(failure: Failure, times: int) -> Failure:
    """What to say of links that break again and again although nobody is dead."""
    message = (
        f"links between the workers broke {times} times in a row without a completed step, and no process was found"
        f" dead: {failure.message.rstrip('.')}."
    )
    return failure.at(message=message)


def autopsy_of_no_return(worker: int, pid: int, terms: Terms) -> Failure:
    """What to say of a worker that a new coordinator never heard of."""
    message = (
        f"worker {worker} (pid {pid}) did not come back within {terms.timing.failure_timeout:.1f} s after the"
        " coordinator was replaced: it hangs, or is cut off."
    )
    return _lost(message, worker, Place())


def autopsy_of_launcher() -> Failure:
    """What to say when nobody is left to look after the workers."""
    return Failure(LAUNCHER_GONE, "the launcher of the job has ended without stopping it.")


def _progress(place: Place) -> tuple[int, bool]:
    return -1 if place.step is None else place.step, bool(place.phase)


def _lost(message: str, worker: int, place: Place) -> Failure:
    return Failure(WORKER_LOST, message, worker=worker, step=place.step, phase=place.phase)


def what_happened(exit_report: ExitReported) -> tuple[str, str]:
    """How a process has ended, and what may have been the cause."""
    if exit_report.signal is not None:
        return describe_departure(-exit_report.signal), likely_cause(-exit_report.signal)
    if exit_report.exit_code == 0:
        return "exited before the job was complete (code 0)", " Does the task call sys.exit()?"
    hint = " Its log in the run folder may say why."
    if exit_report.exit_code == GAVE_UP:
        return "gave up", hint
    return f"exited with code {exit_report.exit_code}", hint


def _where(place: Place) -> str:
    at = f" at step {place.step}" if place.step is not None else ""
    return f"{at} while in {place.phase}" if place.phase else at


def _words(place: Place) -> list[str]:
    step = [f"step {place.step}"] if place.step is not None else []
    return [*step, place.phase] if place.phase else step
