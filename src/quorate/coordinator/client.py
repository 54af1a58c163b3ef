"""The supervisor's and the command line's end of the coordinator's service."""

import json
from collections.abc import Collection, Iterator
from typing import Any

import grpc

from quorate.coordinator.events import Reading
from quorate.coordinator.places import News, Outcome, Vacancy
from quorate.core.errors import LinkError, RequestError
from quorate.core.failure import Failure
from quorate.observe.event import Event
from quorate.observe.jsonl import events_in
from quorate.wire.handshake import Identity
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import decode_failure, encode_failure, open_channel, stub_on, token_metadata, unanswered


class SupervisorClient:
    """Calls a coordinator. Opens its channel at once, so make it after a fork, never before.

    A coordinator that cannot be reached within `timeout` seconds is a LinkError. `identity` is the supervisor's where
    the job encrypts; `authority` is the certificate by which anybody else who holds the token knows the coordinator.
    """

    def __init__(
        self, address: str, token: str, timeout: float = 5.0, identity: Identity | None = None, authority: str = ""
    ) -> None:
        self._identity = identity
        self._authority = authority
        self._timeout = timeout
        # One try of what is tried again: meanwhile the caller sees nothing else, a dead coordinator say.
        self._attempt = timeout / 10
        self._metadata = token_metadata(token)
        self._open(address)

    def _open(self, address: str) -> None:
        self._address = address
        self._channel = open_channel(address, self._identity, self._authority)
        self._stub = stub_on(self._channel)

    def redirect(self, address: str) -> None:
        """Call another coordinator from now on; calls under way end with a LinkError."""
        last = self._channel
        self._open(address)
        last.close()

    def report_exit(
        self,
        slot: int,
        pid: int,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        step: int | None = None,
        phase: str = "",
        host: str = "",
        reading: Reading | None = None,
    ) -> None:
        """A worker's process is gone: with an exit code or by a signal, and how far it was last known to be."""
        report = pb.ExitReport(slot=slot, pid=pid, host=host, step=step, phase=phase)
        if signal is not None:
            report.signal = signal
        else:
            report.exit_code = exit_code or 0
        if reading is not None:
            report.lane, report.epoch, report.sample_count = reading.lane, reading.epoch, reading.count
            report.samples.extend(reading.samples)
        self._call(self._stub.ReportExit, report, self._attempt)

    def report_failure(self, failure: Failure) -> None:
        """The job cannot go on, for a reason that no worker tells."""
        self._call(self._stub.ReportFailure, pb.FailureReport(failure=encode_failure(failure)), self._timeout)

    def stop(self, reason: str) -> None:
        """Stop at the next step boundary, with a checkpoint; `reason` is ``interrupted`` or ``terminated``."""
        self._call(self._stub.Stop, pb.StopRequest(reason=reason), self._attempt)

    def resize(self, workers: int | None = None, servers: int | None = None, reason: str = "") -> None:
        """Go on with so many workers, or servers; None is as many as now. Raises RequestError if that cannot be.

        With a reason it is the job that wants to grow, which the supervisor asks for again if nobody answers.
        """
        request = pb.ResizeRequest(workers=workers, servers=servers, reason=reason)
        reply = self._call(self._stub.Resize, request, self._attempt if reason else self._timeout)
        refusal = decode_failure(reply.refusal)
        if refusal is not None:
            raise RequestError(refusal.message)

    def save(self, request: str) -> int:
        """Save a checkpoint at the next step boundary; the step that the job has reached, as far as that is known.

        `request` tells one request from another: one that is asked for again is done once. Raises RequestError if there
        is nobody to do it any more.
        """
        reply = self._call(self._stub.Save, pb.SaveRequest(request=request), self._timeout)
        refusal = decode_failure(reply.refusal)
        if refusal is not None:
            raise RequestError(refusal.message)
        return int(reply.step)

    def status(self) -> pb.StatusReply:
        """Who is there, and what each was last heard to be doing; nobody where the job has ended."""
        reply: pb.StatusReply = self._call(self._stub.Status, pb.StatusRequest(), self._timeout)
        return reply

    def news(self, timeout: float, processes: Collection[tuple[int, int]] = (), workers: int = 0) -> News:
        """What there is to know; nothing if nothing happens within `timeout` seconds.

        `processes` are those that there are, by slot and pid, or will be, with the pid 0: places that one of them has
        are not told to be vacant. `workers` is how many the job has as far as the caller knows.
        """
        known = [pb.Process(slot=slot, pid=pid) for slot, pid in sorted(processes)]
        request = pb.OutcomeRequest(timeout=timeout, processes=known, workers=workers)
        reply = self._call(self._stub.Outcome, request, timeout + self._timeout / 2)
        outcome = Outcome(decode_failure(reply.failure), json.loads(reply.result)) if reply.ended else None
        expelled = tuple((one.slot, one.pid) for one in reply.expelled)
        vacant = {one.slot: Vacancy(one.after, one.restore) for one in reply.vacant}
        return News(outcome, expelled, vacant, reply.workers)

    def events(self, offset: int, *, follow: bool) -> "EventStream":
        """The job's events from a place of its log on: those that are there, or also all that follow."""
        request = pb.EventsRequest(offset=offset, follow=follow)
        call = self._call(self._stub.Events, request, None if follow else self._timeout)
        return EventStream(self._address, call)

    def close(self) -> None:
        """Call no more; a call under way ends with a LinkError."""
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            raise unanswered(self._address, error) from None
        except ValueError:  # what gRPC raises for a closed channel
            raise LinkError(f"the call to the coordinator at {self._address} was closed") from None


class EventStream:
    """Events as they come, each time with the place in the log after them. LinkError where they break off."""

    def __init__(self, address: str, call: Any) -> None:
        self._address = address
        self._call = call

    def __iter__(self) -> Iterator[tuple[list[Event], int]]:
        try:
            for reply in self._call:
                yield events_in(reply.lines), reply.offset
        except grpc.RpcError as error:
            raise unanswered(self._address, error) from None

    def cancel(self) -> None:
        """Have whoever waits for more wait no longer."""
        self._call.cancel()
