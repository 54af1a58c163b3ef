"""Who belongs to the job and how it goes on, as one pure function: `decide(state, event, now)`.

A lost worker costs a generation, not the job: the others report where they stand, and go on without it; another takes
its place. A broken link is a symptom: whoever meets one leaves its generation, and the next begins when the death or
the silence behind it is known, or when everybody has turned out to be alive. A link that fails twice like that is
avoided (weak_links.py). What user code raises ends the job.
"""

from dataclasses import replace
from typing import assert_never

from quorate.coordinator.autopsy import (
    WORKER_LOST,
    autopsy_of_launcher,
    autopsy_of_no_return,
    autopsy_of_silence,
    loss_of,
    warning,
)
from quorate.coordinator.events import (
    Completed,
    EndJob,
    ExitReported,
    Expel,
    FailureReported,
    HeartbeatReceived,
    LauncherGone,
    MembershipEvent,
    RecordEvents,
    Refuse,
    Registered,
    Regroup,
    RelaySave,
    RelayStop,
    ResizeRequested,
    SaveRequested,
    StateReported,
    StopRequested,
    Tick,
)
from quorate.coordinator.forming import end, form_if_ready, without_missing
from quorate.coordinator.losses import fill_place, lose, on_exit_reported, on_failure_reported
from quorate.coordinator.places import call_together, expel, places_of, resized
from quorate.coordinator.reports import on_completed, on_heartbeat, on_registered, on_state_reported
from quorate.coordinator.stall import Stall, autopsy_of_hangs, count_hang, find_stall, limit_words, stall_limit
from quorate.coordinator.states import (
    Active,
    Decision,
    Ended,
    Forming,
    JobSettings,
    Members,
    Recalling,
    State,
    Training,
    Unended,
)
from quorate.coordinator.weak_links import who_may_return
from quorate.core.errors import FrameError
from quorate.core.failure import Failure
from quorate.core.generation import name_of, names_of
from quorate.observe.events import Resized
from quorate.observe.quantities import plural

_SELDOM = 3600.0
"""Seconds at most between two tellings of the same."""


def start(settings: JobSettings, now: float) -> Forming:
    """The state of a coordinator that has just begun to serve."""
    everybody = frozenset(places_of(settings.workers + settings.spares, settings.servers))
    members = Members(settings, now, settings.workers, settings.servers, awaited=everybody)
    return Forming(members, since=now)


def decide(state: State, event: MembershipEvent, now: float) -> Decision:  # noqa: C901, PLR0912 (one case for each event)
    """What follows from an event: the next state, what to do, and why."""
    if isinstance(state, Ended):
        return _after_the_end(state, event)
    match event:
        case Registered():
            decision = on_registered(state, event, now)
        case HeartbeatReceived():
            decision = on_heartbeat(state, event, now)
        case StateReported():
            decision = on_state_reported(state, event, now)
        case FailureReported():
            decision = on_failure_reported(state, event, now)
        case ExitReported():
            decision = on_exit_reported(state, event, now)
        case Completed():
            decision = on_completed(state, event, now)
        case StopRequested():
            decision = on_stop_requested(state, event, now)
        case ResizeRequested():
            decision = on_resize_requested(state, event, now)
        case SaveRequested():
            decision = on_save_requested(state, event)
        case LauncherGone():
            decision = on_launcher_gone(state)
        case Tick():
            decision = on_tick(state, now)
        case _:
            assert_never(event)
    after = decision.state
    if isinstance(after, Ended):
        # What workers tell later is written down once as well.
        heard = {known.worker: known.sequence for known in state.members.enrolled}
        return replace(decision, state=replace(after, heard=heard))
    if after.members.founders and after.members.has_state:
        # What others have found before is out of date: whoever holds the state again may save a newer one.
        return replace(decision, state=replace(after, members=replace(after.members, founders=frozenset())))
    return decision


def _after_the_end(state: Ended, event: MembershipEvent) -> Decision:
    """One failure ends a job, and what comes later is a consequence. What workers still tell is written down."""
    if isinstance(event, Registered):
        failure = state.failure or Failure(FrameError.__name__, "the job is complete; it takes no more workers.")
        return Decision(state, (Refuse(event.worker, failure),), f"{name_of(event.worker)} comes after the end")
    if isinstance(event, HeartbeatReceived) and event.events:
        heard = state.heard.get(event.worker)
        if heard is None or event.sequence <= heard:
            return Decision(state, (), f"{name_of(event.worker)} has reported this before, or has never joined")
        later = replace(state, heard={**state.heard, event.worker: event.sequence})
        return Decision(later, (RecordEvents(event.events),), f"{name_of(event.worker)} reports its last events")
    return Decision(state, (), "the job has ended")


# --- requests from outside


def on_stop_requested(state: Active, event: StopRequested, now: float) -> Decision:
    """The job shall stop at the next step boundary."""
    if state.members.stop is not None:
        return Decision(state, (), f"a stop is under way already ({state.members.stop})")
    stopping = replace(state, members=replace(state.members, stop=event.reason))
    return form_if_ready(stopping, (RelayStop(event.reason),), f"stop at the next step boundary: {event.reason}", now)


def on_save_requested(state: Active, event: SaveRequested) -> Decision:
    """A checkpoint shall be saved. Between two generations nobody can: whoever wants one asks again."""
    if not isinstance(state, Training):
        return Decision(state, (), "a checkpoint was requested while no generation is active: to be requested again")
    generation = state.generation.id
    return Decision(
        state, (RelaySave(generation, event.request),), f"a checkpoint was requested of generation {generation}"
    )


def on_resize_requested(state: Active, event: ResizeRequested, now: float) -> Decision:
    """The job shall go on with another number of workers, or of servers."""
    members, settings = state.members, state.members.settings
    workers = members.wanted if event.workers is None else event.workers
    servers = members.wanted_servers if event.servers is None else event.servers
    why = f"it is stopping ({members.stop})." if members.stop is not None else ""
    if workers < settings.min_workers:
        why = f"min_workers is {settings.min_workers}."
    if not 1 <= workers <= settings.lanes:
        why = f"it has {settings.lanes} lanes, so 1 to {settings.lanes} are possible."
    if settings.mesh is not None and workers != members.wanted:
        why = (
            f"its state is cut for {settings.mesh.size} workers ({settings.mesh}). Stop it, and resume it with"
            " other `strategy` and `workers`."
        )
    elif settings.is_fixed and workers != members.wanted:
        why = (
            f"batch norm takes the statistics of all {members.wanted} (strategy.sync_batch_norm). Start another run"
            " from its checkpoint with --branch."
        )
    asked = f"{workers} workers"
    if event.servers is not None:
        asked = f"{servers} servers" if event.workers is None else f"{asked} and {servers} servers"
        if not settings.servers:
            why = "only `strategy: parameter-server` has servers."
        elif servers < 1:
            why = f"it has {members.wanted_servers} servers, and 1 is the minimum."
    if why:
        message = f"the job cannot have {asked}: {why}"
        return Decision(state, (Refuse(None, Failure("RequestError", message)),), message)
    if (workers, servers) == (members.wanted, members.wanted_servers):
        return Decision(state, (), f"the job has {asked} already")
    changed: Active = replace(state, members=resized(members, workers, servers))
    changes = {"worker": (members.wanted, workers), "server": (members.wanted_servers, servers)}
    reason = "the job continues with " + " and ".join(
        f"{plural(after, what)} instead of {before}" for what, (before, after) in changes.items() if before != after
    )
    told = Resized(
        before=members.wanted, workers=workers, servers=servers or None, reason=event.reason or None, time=now
    )
    actions = (told, *call_together(changed))
    return form_if_ready(changed, actions, reason, now)


def on_launcher_gone(state: Active) -> Decision:
    """A launcher that has asked for a stop does not wait for workers that are still being built: nothing is lost."""
    stop = state.members.stop
    if stop is None or not isinstance(state, Forming) or state.members.has_state:
        return end(autopsy_of_launcher())
    result = {"ending": stop}
    return Decision(Ended(None, result), (EndJob(None, "", result),), f"stopped before the first step: {stop}")


# --- time has passed: silence, processes that do not end, stalls, trials of bad links


def on_tick(state: Active, now: float) -> Decision:
    """Time has passed."""
    members = state.members
    timeout = members.settings.timing.failure_timeout
    if now - members.ticked > timeout / 2:
        return _forgive_silence(state, now)
    unended = {
        process: members.unended.get(process, Unended(now, now + timeout)) for process in sorted(members.expelled)
    }
    state = replace(state, members=replace(members, ticked=now, unended=unended))
    quietest = min(members.enrolled, key=lambda known: known.heard, default=None)
    if quietest and now - quietest.heard >= timeout:
        failure = autopsy_of_silence(quietest, now, members.settings)
        return lose(state, quietest, failure, now - quietest.heard, now, is_reaped=False)
    if isinstance(state, Recalling):
        return _give_up_missing(state, now)
    if unended and (told := _find_unended(state, now)):
        return told
    if stall := find_stall(state, now):
        return _act_on_stall(state, stall, now)
    # Whoever is on the way to its place takes what time it needs: its supervisor tells when it is gone.
    return _let_in_again(state, now) if isinstance(state, Training) else Decision(state, (), "nothing is overdue")


def _forgive_silence(state: Active, now: float) -> Decision:
    """Nobody is lost by a pause of the coordinator itself (a suspended machine, a stopped process group)."""
    members = state.members
    heard = tuple(replace(known, heard=now, moved=now) for known in members.enrolled)
    suspicion = members.suspicion and replace(members.suspicion, since=now)
    reason = f"the coordinator was held up for {now - members.ticked:.1f} s; silence counts from now"
    forgiven: Active = replace(
        state, members=replace(members, ticked=now, enrolled=heard, suspicion=suspicion, unended={})
    )
    if not isinstance(forgiven, Training):
        forgiven = replace(forgiven, since=forgiven.since + now - members.ticked)
    return Decision(forgiven, (), reason)


def _find_unended(state: Forming | Training, now: float) -> Decision | None:
    """A process was killed and does not end: it is told, and where a generation waits for long the job is given up.

    The kernel ends nobody who waits for a disk that does not answer, and until then its place cannot be filled.
    """
    members, settings = state.members, state.members.settings
    limit = max(stall_limit(members), 2 * settings.timing.failure_timeout)
    for (worker, pid), killed in members.unended.items():
        seconds = now - killed.since
        message = (
            f"{name_of(worker)} (pid {pid}) was to be killed {seconds:.0f} s ago and is not known to have ended, so"
            " nobody can take its place. Its host cannot be reached, or it waits in the kernel, for a disk or a network"
            " file system that does not answer."
        )
        if isinstance(state, Forming) and now - max(killed.since, state.since) >= limit:
            why = (
                f"{message} The next generation has waited for longer than step_timeout"
                f" ({limit_words(settings.step_timeout, limit)}), so the job is stopped."
            )
            return end(Failure(WORKER_LOST, why, worker=worker))
        if now >= killed.tell_at:
            later = replace(killed, tell_at=now + min(2 * seconds, _SELDOM))
            told = replace(state, members=replace(members, unended={**members.unended, (worker, pid): later}))
            return Decision(told, (warning(message, members.cursor.step, now),), message)
    return None


def _act_on_stall(state: Active, stall: Stall, now: float) -> Decision:
    members, status = state.members, stall.culprit.status
    limit = limit_words(members.settings.step_timeout, stall.limit)
    if stall.seconds >= stall.limit:
        message = f"{stall.message} That is longer than step_timeout ({limit})."
        failure = Failure(WORKER_LOST, message, worker=stall.culprit.worker, step=status.step, phase=status.phase)
        members = count_hang(members, stall)
        if hopeless := autopsy_of_hangs(members, failure):
            return end(hopeless, loss_of(failure, stall.seconds, now))
        return lose(replace(state, members=members), stall.culprit, failure, stall.seconds, now, is_reaped=False)
    if members.reported_stall == stall.since:
        return Decision(state, (), f"step {stall.step} still takes its time")
    message = f"{stall.message} It is waited for until step_timeout ({limit})."
    told = replace(state, members=replace(members, reported_stall=stall.since))
    return Decision(told, (warning(message, stall.step, now),), message)


def _give_up_missing(state: Recalling, now: float) -> Decision:
    """Those who have not come back are lost, one after the other; until then nobody is who was not reaped."""
    if not state.missing or now - state.since < state.members.settings.timing.failure_timeout:
        return Decision(state, (), "nothing is overdue")
    worker, pid = process = min(state.missing)
    failure = autopsy_of_no_return(worker, pid, state.members.settings)
    gone = without_missing(state, process)
    left = replace(gone, members=expel(gone.members, {process}))
    actions = (loss_of(failure, now - state.since, now), Expel(worker, pid))
    return fill_place(left, worker, failure, actions, now, is_vacant=False)


def _let_in_again(state: Training, now: float) -> Decision:
    """Who was left out for a bad link is let in again at a step boundary: to train with it is to try it."""
    members = state.members
    back = who_may_return(members, now) if members.stop is None and not state.is_called else {}
    if not back:
        return Decision(state, (), "nothing is overdue")
    told = ", ".join(
        f"{name_of(worker)} (its link between {names_of(link.pair, ' and ')} has rested {now - link.failed:.1f} s)"
        for worker, link in back.items()
    )
    action = Regroup(state.generation.id, at_boundary=True)
    return Decision(replace(state, is_called=True), (action,), f"let in again at the next step boundary: {told}")
