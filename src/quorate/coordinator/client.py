"""The supervisor's and the command line's end of the coordinator's service."""

import json
from dataclasses import dataclass
from typing import Any

import grpc

from quorate.core.errors import LinkError
from quorate.core.failure import Failure
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import open_channel, token_metadata, unanswered
from quorate.wire.proto.codec import decode_failure, encode_failure
from quorate.wire.proto.coordinator_pb2_grpc import CoordinatorStub


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a failure, or with a result."""

    failure: Failure | None
    result: dict[str, Any]


@dataclass(frozen=True)
class News:
    """What the supervisor has to know: how the job ended, if it has, and which processes count as lost."""

    outcome: Outcome | None
    expelled: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Vacancy:
    """A place to be filled after so many seconds; by one that restores the newest checkpoint, if nobody has state."""

    after: float
    restore: bool


class SupervisorClient:
    """Calls a coordinator. Opens its channel at once, so make it after a fork, never before.

    A coordinator that cannot be reached within `timeout` seconds is a LinkError.
    """

    def __init__(self, address: str, token: str, timeout: float = 5.0) -> None:
        self._address = address
        self._timeout = timeout
        self._metadata = token_metadata(token)
        self._channel = open_channel(address)
        self._stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

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
    ) -> Vacancy | None:
        """A worker's process is gone: with an exit code or by a signal, and how far it was last known to be.

        The answer says whether another shall take its place.
        """
        report = pb.ExitReport(slot=slot, pid=pid, host=host, step=step, phase=phase)
        if signal is not None:
            report.signal = signal
        else:
            report.exit_code = exit_code or 0
        reply = self._call(self._stub.ReportExit, report, self._timeout)
        return Vacancy(reply.after, reply.restore) if reply.refill else None

    def report_failure(self, failure: Failure) -> None:
        """The job cannot go on, for a reason that no worker tells."""
        self._call(self._stub.ReportFailure, pb.FailureReport(failure=encode_failure(failure)), self._timeout)

    def stop(self, reason: str) -> None:
        """Stop at the next step boundary, with a checkpoint; `reason` is ``interrupted`` or ``terminated``."""
        self._call(self._stub.Stop, pb.StopRequest(reason=reason), self._timeout)

    def news(self, timeout: float) -> News:
        """What there is to know; nothing if nothing happens within `timeout` seconds."""
        reply = self._call(self._stub.Outcome, pb.OutcomeRequest(timeout=timeout), timeout + self._timeout)
        outcome = Outcome(decode_failure(reply.failure), json.loads(reply.result)) if reply.ended else None
        return News(outcome, tuple((one.slot, one.pid) for one in reply.expelled))

    def close(self) -> None:
        """Call no more; a call under way ends with a LinkError."""
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout: float) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            raise unanswered(self._address, error) from None
        except ValueError:  # what gRPC raises for a closed channel
            raise LinkError(f"the call to the coordinator at {self._address} was closed") from None
