"""The coordinator's process: ``python -m quorate.coordinator``.

It is told its job by one line of JSON on standard input, since a command line can be read by every user of the
machine and the line holds the token. It answers with one line on standard output, logs to a file of the run, and ends
when standard input does: the launcher holds the other end, and a launcher that dies lets go of it.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quorate.checkpoint.listing import newest_generation
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import LauncherGone
from quorate.coordinator.membership import start
from quorate.coordinator.server import open_door, open_server
from quorate.coordinator.service import CoordinatorService
from quorate.coordinator.states import Ended, Handover, JobSettings, State
from quorate.coordinator.succession import take_over
from quorate.core.addresses import enter_network
from quorate.core.errors import CheckpointError, QuorateError, RequestError
from quorate.core.generation import MeshShape
from quorate.core.log_records import Place, RecordHandler, current_place
from quorate.core.masking import register_secrets
from quorate.core.processes import show_as
from quorate.core.timing import Timing
from quorate.observe.events import CoordinatorReplaced
from quorate.observe.jsonl import JsonlSink
from quorate.storage.fencing import IncarnationWatch
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.wire.handshake import Identity

log = logging.getLogger(__name__)

_STDIN, _STDOUT = 0, 1


@dataclass(frozen=True)
class Appointment:
    """What the launcher tells its coordinator."""

    run: str
    token: str
    # Without its incarnation, which it finds itself.
    settings: JobSettings
    host: str = "127.0.0.1"
    port: int = 0
    log_level: str = "info"
    # For one that takes the place of another: who is there.
    roster: dict[str, Any] | None = None
    # The namespace that it lives in, if it is another than that of its launcher.
    network: str = ""
    # What must not be written down, besides the token.
    secrets: Sequence[str] = ()
    # What it shows to those who call it; without one nothing is encrypted.
    identity: Identity | None = None
    # Which launch of the run it belongs to.
    launch: str = ""

    @classmethod
    def from_json(cls, line: bytes) -> "Appointment":
        """The appointment that a line tells."""
        try:
            told: Any = json.loads(line)
            told["identity"] = Identity.from_json(told.get("identity"))
            told["timing"] = Timing(told.pop("failure_timeout"))
            if told.get("mesh") is not None:
                told["mesh"] = MeshShape(*told["mesh"])
            names = told.keys() & {field.name for field in fields(JobSettings)}
            return cls(settings=JobSettings(incarnation=0, **{name: told.pop(name) for name in names}), **told)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise RequestError(f"the coordinator was given no appointment on standard input: {error}") from None


def main() -> int:
    """Serve one job; the exit code."""
    # Ctrl-C goes to the whole process group. The launcher decides when to end, and a coordinator that is gone
    # could not relay the stop that leads to a checkpoint.
    for interruption in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interruption, signal.SIG_IGN)
    try:
        appointment = Appointment.from_json(_read_line())
        _start_log(appointment)
        if appointment.network:
            enter_network(appointment.network)
        asyncio.run(_serve(appointment))
    except QuorateError as error:
        _answer({"error": error.message, "exit_code": error.exit_code})
        return error.exit_code
    except Exception:
        log.exception("the coordinator itself has failed")
        return 1
    return 0


def _start_log(appointment: Appointment) -> None:
    keys = [] if appointment.identity is None else appointment.identity.secrets
    register_secrets([appointment.token, *keys, *appointment.secrets])
    run = RunFolder(Path(appointment.run))
    place = Place("coordinator", run.name)
    handler = RecordHandler(place, LogFile(run.logs / "coordinator.jsonl", {"process": place.process}).append)
    show_as(place.process, place.run)
    logging.basicConfig(level=appointment.log_level.upper(), handlers=[handler])


async def _serve(appointment: Appointment) -> None:
    run = RunFolder(Path(appointment.run))
    mesh, workers = appointment.settings.mesh, appointment.settings.workers
    if mesh is not None and mesh.size != workers:
        # Its first generation would wait for the others without end.
        raise RequestError(f"the mesh ({mesh}) has {mesh.size} workers, and the job {workers}")
    # On the disk before anybody is answered: generations of an earlier coordinator are lower than ours.
    incarnation = run.next_incarnation(_incarnation_elsewhere(run), appointment.launch)
    settings = replace(appointment.settings, incarnation=incarnation)
    timing = settings.timing

    watched = run.incarnations if run.stored is None else IncarnationWatch(run.incarnations, timing.heartbeat_every)

    def is_superseded() -> bool:
        return watched.newest() > settings.incarnation

    with contextlib.closing(EventLog(JsonlSink(run.events_file))) as event_log:
        service = CoordinatorService(
            settings, event_log, _begin(settings, event_log, appointment.roster), is_superseded
        )
        if (place := current_place()) is not None:
            place.moving = lambda: {"generation": service.generation}
        server, address = open_server(
            service, appointment.token, appointment.host, appointment.port, appointment.identity, is_superseded
        )
        door = None if appointment.identity is None else open_door(server, appointment.host, appointment.identity)
        await server.start()
        run.write_address(address, appointment.token, door)
        try:
            _answer({"address": address})
            await _until_over(service, timing)
            if service.superseded.is_set():
                log.warning(
                    "coordinator %d ends: coordinator %d has taken its place, and this one writes nothing more",
                    settings.incarnation,
                    run.incarnations.newest(),
                )
        finally:
            run.remove_address(address)  # the other may have written its own there
            await server.stop(timing.heartbeat_every)


def _incarnation_elsewhere(run: RunFolder) -> int:
    """The highest that has committed a checkpoint: a run that was fetched from a store has gone on somewhere else, and
    what it goes on to save here must not count as older."""
    try:
        return newest_generation(run.checkpoints)[0]
    except CheckpointError as error:
        log.warning("%s", error)
        return 0


def _begin(settings: JobSettings, event_log: EventLog, roster: dict[str, Any] | None) -> State:
    """The state to begin with: a job that begins, one that goes on, or one that has ended already."""
    if roster is None:
        return start(settings, time.monotonic())
    present = frozenset((slot, pid) for slot, pid in roster["present"])
    handover = Handover(present, frozenset(roster["awaited"]), roster["has_begun"])
    state = take_over(settings, handover, event_log.recall(roster["events_from"]), time.monotonic())
    if not isinstance(state, Ended):
        event_log.publish(CoordinatorReplaced(incarnation=settings.incarnation, present=len(present)))
    return state


async def _until_over(service: CoordinatorService, timing: Timing) -> None:
    launcher_gone = _watch_launcher()
    async with asyncio.TaskGroup() as group:
        time_keeping = group.create_task(service.keep_time())
        told = group.create_task(_told_everyone(service, timing))
        gone = group.create_task(launcher_gone.wait())
        superseded = group.create_task(service.superseded.wait())
        await asyncio.wait({told, gone, superseded}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not service.is_superseded():
            service.apply(LauncherGone())
        for task in (time_keeping, told, gone, superseded):
            task.cancel()


async def _told_everyone(service: CoordinatorService, timing: Timing) -> None:
    """The job is over, its outcome was fetched, the workers had time to hear of it, and the launcher to read the events
    that they have told last."""
    await service.ended.wait()
    await service.outcome_fetched.wait()
    await asyncio.sleep(2 * timing.failure_timeout)


def _watch_launcher() -> asyncio.Event:
    """An event that is set when standard input ends. A thread reads it: asyncio can wait for pipes only."""
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        while os.read(_STDIN, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=wait_for_end, name="launcher-watch", daemon=True).start()
    return gone


def _read_line() -> bytes:
    """The first line of standard input, byte by byte: a buffered read would hold back its end from the watch."""
    line = bytearray()
    while not line.endswith(b"\n"):
        character = os.read(_STDIN, 1)
        if not character:
            break
        line += character
    return bytes(line)


def _answer(fields: dict[str, Any]) -> None:
    # Not by a file of Python's, which would try again what nobody reads when the interpreter ends.
    try:
        os.write(_STDOUT, json.dumps(fields).encode() + b"\n")
    except BrokenPipeError:
        log.info("the launcher has ended before this coordinator was ready: nobody reads its answer")


if __name__ == "__main__":
    sys.exit(main())
