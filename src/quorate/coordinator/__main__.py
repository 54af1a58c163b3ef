"""The coordinator's process: ``python -m quorate.coordinator``.

It is told its job by one line of JSON on standard input, since a command line can be read by every user of the
machine and the line holds the token. It answers with one line on standard output, logs to a file of the run, and ends
when standard input does: the launcher holds the other end, and a launcher that dies lets go of it.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from quorate.checkpoint.listing import newest_generation
from quorate.coordinator.event_log import EventLog
from quorate.coordinator.events import LauncherGone
from quorate.coordinator.forming import take_over
from quorate.coordinator.membership import start
from quorate.coordinator.service import CoordinatorService
from quorate.coordinator.states import Ended, Handover, JobSettings, State
from quorate.core.addresses import enter_network, join_address
from quorate.core.errors import CheckpointError, QuorateError, RequestError
from quorate.core.generation import MeshShape, file_name_of
from quorate.core.log_records import Place, RecordHandler, current_place
from quorate.core.masking import register_secrets
from quorate.core.processes import show_as
from quorate.core.timing import Timing
from quorate.observe.events import CoordinatorReplaced
from quorate.observe.jsonl import JsonlSink
from quorate.storage.fencing import IncarnationWatch
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.wire.handshake import SUPERVISOR, Identity, in_words, process_in
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import MESSAGE_OPTIONS, carries_token, handlers_of

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
            if told.get("identity") is not None:
                told["identity"] = Identity(**told["identity"])
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


# --- where it listens, and who may call it


def speaker_of(request: Any) -> str | None:
    """The process that has to show its certificate for a request; None where the token is enough."""
    match request:
        case pb.RegisterRequest():
            return file_name_of(request.slot)
        case pb.HeartbeatRequest() | pb.StateReport() | pb.CompleteRequest() | pb.FollowRequest():
            return file_name_of(request.worker)
        case pb.FailureReport() if request.HasField("worker"):
            return file_name_of(request.worker)
        case pb.ExitReport():
            return SUPERVISOR
        case _:
            return None


class Admission:
    """Turns away, before a call is answered, whoever does not carry the job's token or, where the job encrypts, speaks
    for a process that it is not by its certificate; and everybody once another coordinator has a higher incarnation:
    who calls tries again, there."""

    def __init__(self, token: str, is_superseded: Callable[[], bool], *, asks_for_certificate: bool) -> None:
        if not token:
            raise ValueError("a coordinator needs a token: an empty one would let everybody in")
        self._token = token
        self._is_superseded = is_superseded
        self._asks_for_certificate = asks_for_certificate

    def guarded(self, method: Any, *, is_stream: bool) -> Any:
        """A method of the service that is called by those who are let in."""

        async def answer(request: Any, context: Any) -> Any:
            await self._judge(request, context)
            return await method(request, context)

        async def stream(request: Any, context: Any) -> Any:
            await self._judge(request, context)
            async for reply in method(request, context):
                yield reply

        return stream if is_stream else answer

    async def _judge(self, request: Any, context: Any) -> None:
        if not carries_token(context.invocation_metadata() or (), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this job's token")
        if self._is_superseded():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "another coordinator has taken the place of this one")
        speaker = speaker_of(request) if self._asks_for_certificate else None
        names = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]
        shown = next((process for process in map(process_in, names) if process), "")
        if speaker is not None and shown != speaker:
            whose = f"the certificate of {in_words(shown)}" if shown else "no certificate"
            message = f"a caller ({context.peer()}) spoke for {in_words(speaker)} and showed {whose}"
            log.warning("refused: %s", message)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)


def open_server(
    service: object,
    token: str,
    host: str,
    port: int,
    identity: Identity | None = None,
    is_superseded: Callable[[], bool] = lambda: False,
) -> tuple[grpc.aio.Server, str]:
    """What serves a coordinator once it is started, and the address that it listens at.

    With an identity it is encrypted, and whoever calls has to show a certificate of the job beside its token.
    """
    # Without so_reuseport=0 two coordinators could share a port, and each would get half of the other's calls.
    options = (("grpc.so_reuseport", 0), *MESSAGE_OPTIONS)
    admission = Admission(token, is_superseded, asks_for_certificate=identity is not None)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((handlers_of(service, admission.guarded),))
    try:
        if identity is None:
            bound = server.add_insecure_port(join_address(host, port))
        else:
            bound = server.add_secure_port(join_address(host, port), _credentials(identity, asks_for_certificate=True))
    except RuntimeError as error:
        raise RequestError(explain_refusal(host, port, str(error))) from None
    return server, join_address(host, bound)


def open_door(server: grpc.aio.Server, host: str, identity: Identity) -> dict[str, str]:
    """A second port, for the owner of the run, who holds its token but no key: where it is, and by which authority's
    certificate the coordinator is known there. Written down with the token, since neither lets anybody be a worker."""
    bound = server.add_secure_port(join_address(host, 0), _credentials(identity, asks_for_certificate=False))
    return {"address": join_address(host, bound), "authority": identity.authority}


def _credentials(identity: Identity, *, asks_for_certificate: bool) -> Any:
    return grpc.ssl_server_credentials(
        [(identity.key.encode(), identity.certificate.encode())],
        identity.authority.encode() if asks_for_certificate else None,
        require_client_auth=asks_for_certificate,
    )


def explain_refusal(host: str, port: int, detail: str) -> str:
    """Why a port cannot be had, and what to do. gRPC only says that it cannot, so the operating system is asked."""
    place, remedy = join_address(host, port), "choose another with `port`, or 0 for any free one"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is in use; {remedy}"
        return f"cannot listen on {place}: {error.strerror or error}; {remedy}"
    return f"cannot listen on {place}: {detail}"


if __name__ == "__main__":
    sys.exit(main())
