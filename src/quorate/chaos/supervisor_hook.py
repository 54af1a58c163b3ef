"""Faults that a supervisor brings about: those from outside of the workers, when workers call for them, and the end of
those that last."""

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from quorate.chaos.network_namespaces import NetworkNamespaces
from quorate.chaos.script import RESIZES, Act, Fault, Firing, Whom, call_of, firings, mark, marker_of
from quorate.coordinator.places import Outcome
from quorate.core.addresses import LOOPBACK, Network
from quorate.core.errors import LinkError, RequestError
from quorate.core.generation import FIRST_SERVER, Role
from quorate.core.processes import is_stopped
from quorate.engines.engine import Prepared
from quorate.engines.local import LocalEngine
from quorate.observe.event import Event
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Controls, Launch, Supervisor
from quorate.worker.assignment import Assignment

log = logging.getLogger(__name__)

WORKER_HOOK = "quorate.chaos.worker_hook:hook_of"


def run_under(faults: Sequence[Fault]) -> Callable[..., Outcome]:
    """What runs a job on this machine under these faults."""

    def run(
        launch: Launch, handle: Callable[[Event], None], accept: Callable[[Prepared], None], signals: Signals
    ) -> Outcome:
        with contextlib.ExitStack() as stack:
            namespaces = None
            added = [fault.whom for fault in faults if fault.act is Act.ADD]
            servers = launch.spec.strategy.server_count
            workers = launch.workers + launch.spec.spares + added.count(None)
            if any(fault.act is Act.CUT for fault in faults):
                # Whoever is cut off lives in a network of its own, and so does everybody who may come to be there.
                namespaces = stack.enter_context(NetworkNamespaces(workers + servers + added.count(Whom.SERVER)))
            hook = FaultInjection(faults, launch.run.logs, namespaces, servers, workers)
            engine = LocalEngine(launch.run, launch.preparation, hook.network_of)
            return Supervisor(engine, launch, handle, accept, signals, hook).run()

    return run


class FaultInjection:
    """Each fault comes about once in a run. The marker that proves it is on the disk before."""

    def __init__(
        self,
        faults: Sequence[Fault],
        logs: Path,
        namespaces: NetworkNamespaces | None = None,
        servers: int = 0,
        most_workers: int = 0,
    ) -> None:
        self._servers = servers
        self._most_workers = most_workers
        self._faults = faults
        self._logs = logs
        self._namespaces = namespaces
        self._cut: list[tuple[float, int]] = []
        self._stopped_since: dict[Firing, float] = {}
        self._continued: set[Firing] = set()
        self._stops_somebody = any(fault.act is Act.STOP for fault in faults)
        self._pending = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.is_outside and not marker_of(logs, number, None).exists()
        }

    def network_of(self, place: int) -> Network:
        return LOOPBACK if self._namespaces is None else self._namespaces.network_of(self._namespace_of(place))

    def _namespace_of(self, place: int) -> int:
        """Those of servers come after all that workers may need."""
        return place if Role.of(place) is Role.WORKER else self._most_workers + place - FIRST_SERVER

    def on_start(self, assignment: Assignment) -> Assignment:
        options = {"faults": [asdict(fault) for fault in self._faults], "servers": self._servers}
        return replace(assignment, hook=WORKER_HOOK, hook_options=options)

    def on_round(self, controls: Controls, now: float) -> None:
        """Bring about what workers call for; end what has lasted for long enough."""
        for over, place in list(self._cut):
            if now >= over and self._namespaces is not None:
                self._cut.remove((over, place))
                self._namespaces.heal(place)
        for number, fault in list(self._pending.items()):
            firing = self._called_for(number)
            if firing is not None and self._happens(fault, firing, controls, now):
                del self._pending[number]
        if self._stops_somebody:
            self.continue_stopped(set(controls.running.values()), now)

    def continue_stopped(self, pids: set[int], now: float) -> None:
        """Have those go on who have stopped themselves, which the markers tell, and were stopped for long enough.

        `pids`: of the workers' processes; of those who have stopped some may be gone.
        """
        for firing in firings(self._logs):
            fault = self._faults[firing.fault]
            if fault.act is not Act.STOP or firing in self._continued or firing.pid not in pids:
                continue
            # The marker comes first: a signal before the worker has stopped would be lost, and it would stay so.
            if is_stopped(firing.pid) and now - self._stopped_since.setdefault(firing, now) >= (fault.seconds or 0.0):
                self._continued.add(firing)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(firing.pid, signal.SIGCONT)

    def _called_for(self, number: int) -> Firing | None:
        try:
            called = json.loads(call_of(self._logs, number).read_bytes())
        except (OSError, ValueError):  # nobody has called, or the call is being written
            return None
        return Firing(number, None, os.getpid(), called["step"], called["phase"])

    def _happens(self, fault: Fault, firing: Firing, controls: Controls, now: float) -> bool:
        """Have it happen; whether it has, or never will."""
        if fault.act in RESIZES:
            return self._resize(fault, firing, controls)
        if not mark(self._logs, firing):
            return True
        log.warning("the fault `%s` is injected at step %d, in %s", fault, firing.step, firing.phase)
        if fault.act is Act.CUT and self._namespaces is not None and fault.worker is not None:
            namespace = self._namespace_of(fault.worker)
            self._namespaces.cut(namespace)
            self._cut.append((now + (fault.seconds or 0.0), namespace))
        elif fault.whom is Whom.COORDINATOR:
            controls.kill_coordinator()
        elif fault.whom is Whom.LAUNCHER:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def _resize(self, fault: Fault, firing: Firing, controls: Controls) -> bool:
        try:
            if fault.whom is Whom.SERVER:
                controls.resize(None, self._servers + RESIZES[fault.act])
                self._servers += RESIZES[fault.act]
            else:
                controls.resize(controls.workers + RESIZES[fault.act], None)
        except RequestError as error:
            log.warning("the fault `%s` cannot be injected: %s", fault, error.message)
            return True
        except LinkError as error:  # a coordinator that is being replaced, say: asked again
            log.info("the fault `%s` has to wait: %s", fault, error.message)
            return False
        mark(self._logs, firing)
        log.warning("the fault `%s` is injected at step %d, in %s", fault, firing.step, firing.phase)
        return True
