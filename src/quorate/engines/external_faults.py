"""Faults that come from outside of the workers: the launcher brings them about when workers call for them."""

import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from quorate.coordinator.client import SupervisorClient
from quorate.core.errors import LinkError, RequestError
from quorate.core.fault import RESIZES, Act, Fault, Whom
from quorate.engines.coordinator_keeper import CoordinatorKeeper
from quorate.engines.network_namespaces import NetworkNamespaces
from quorate.worker.faults import Firing, call_of, mark, marker_of

log = logging.getLogger(__name__)


class ExternalFaults:
    """Each comes about once in a run. The marker that proves it is on the disk before."""

    def __init__(
        self,
        faults: Sequence[Fault],
        logs: Path,
        coordinator: CoordinatorKeeper,
        client: SupervisorClient,
        workers: Callable[[], int],
        namespaces: NetworkNamespaces | None = None,
    ) -> None:
        self._logs = logs
        self._coordinator = coordinator
        self._client = client
        self._workers = workers
        self._namespaces = namespaces
        self._cut: list[tuple[float, int]] = []
        self._pending = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.is_outside and not marker_of(logs, number, None).exists()
        }

    def bring_about(self, now: float) -> None:
        """Whatever workers call for; and what has been cut for long enough is healed."""
        for over, place in list(self._cut):
            if now >= over and self._namespaces is not None:
                self._cut.remove((over, place))
                self._namespaces.heal(place)
        for number, fault in list(self._pending.items()):
            firing = self._called_for(number)
            if firing is not None and self._happens(fault, firing, now):
                del self._pending[number]

    def _called_for(self, number: int) -> Firing | None:
        """The moment of a fault, once it has come."""
        try:
            called = json.loads(call_of(self._logs, number).read_bytes())
        except (OSError, ValueError):  # nobody has called, or the call is being written
            return None
        return Firing(number, None, os.getpid(), called["step"], called["phase"])

    def _happens(self, fault: Fault, firing: Firing, now: float) -> bool:
        """Have it happen; whether it has, or never will."""
        if fault.act in RESIZES:
            return self._resize(fault, firing)
        if not mark(self._logs, firing):
            return True
        log.warning("the fault `%s` comes about at step %d, in %s", fault, firing.step, firing.phase)
        if fault.act is Act.CUT and self._namespaces is not None and fault.worker is not None:
            self._namespaces.cut(fault.worker)
            self._cut.append((now + (fault.seconds or 0.0), fault.worker))
        elif fault.whom is Whom.COORDINATOR:
            self._coordinator.kill()
        elif fault.whom is Whom.LAUNCHER:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def _resize(self, fault: Fault, firing: Firing) -> bool:
        workers = self._workers() + RESIZES[fault.act]
        try:
            self._client.resize(workers)
        except RequestError as error:
            log.warning("the fault `%s` cannot come about: %s", fault, error.message)
            return True
        except LinkError as error:  # a coordinator that is being replaced, say: asked again
            log.info("the fault `%s` has to wait: %s", fault, error.message)
            return False
        mark(self._logs, firing)
        log.warning("the fault `%s` comes about at step %d, in %s", fault, firing.step, firing.phase)
        return True
