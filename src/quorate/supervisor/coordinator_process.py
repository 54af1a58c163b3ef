"""The coordinator's process: whoever dies, or answers no more, is followed by another, at the same address if its host
is still there."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from quorate.coordinator.client import SupervisorClient
from quorate.core.addresses import split_address
from quorate.core.errors import QuorateError
from quorate.core.timing import Timing
from quorate.engines.engine import Engine
from quorate.wire.certificates import Identity

log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""So many coordinators in a row may die without a step in between."""
LEAST_START = 10.0
"""Seconds that one may take to begin, however short failure_timeout is: a loaded machine starts no program faster."""


class CoordinatorProcess:
    """Starts the first at once, beside everything else; `open` waits until it listens.

    Those who follow are told who is there (the roster), and learn the rest from the workers, which go on meanwhile for
    as long as their leases last.
    """

    def __init__(
        self,
        engine: Engine,
        appointment: Mapping[str, Any],
        token: str,
        timing: Timing,
        identity: Identity | None = None,
    ) -> None:
        self._engine = engine
        self._appointment = dict(appointment)
        self._token = token
        self._timing = timing
        # The supervisor's, by which it calls.
        self._identity = identity
        self._process = engine.start_coordinator(self._appointment)
        self._client: SupervisorClient | None = None
        self._deaths = 0
        self._began = self._looked = time.monotonic()
        self.address = ""
        # How the last one that died has ended.
        self.departure = ""

    def open(self) -> SupervisorClient:
        """The calls to it, whoever it is at the time."""
        self.address = str(self._process.await_answer()["address"])
        timeout = self._timing.failure_timeout
        self._client = SupervisorClient(self.address, self._token, timeout, self._identity)
        return self._client

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def note_step(self) -> None:
        """The job advances: those who died before have not kept it from that."""
        self._deaths = 0

    def kill(self) -> None:
        """End it at once; the next round sees that."""
        self._process.kill()

    def kill_if_silent(self, answered: float) -> None:
        """End one that hangs: it has not answered since then, or since it began. Workers wait a little longer."""
        now, limit = time.monotonic(), self._timing.failure_timeout
        if now - self._looked > limit / 2:
            self._began = now  # nobody is to blame for a pause of the launcher itself
        self._looked = now
        silence = now - max(answered, self._began)
        if self.is_alive and silence > limit:
            pid = self._process.pid
            log.warning("the coordinator (pid %d) has not answered for %.1f s, and is killed", pid, silence)
            self._process.kill()

    def replace(self, changes: Mapping[str, Any]) -> bool:
        """Have another take the place of one that is dead; False if too many have died for nothing.

        `changes` is what its appointment says beside that of the first: who is there.
        """
        self.departure = self._process.departure
        self._deaths += 1
        if self._deaths > MOST_DEATHS:
            return False
        log.warning("%s; another takes its place", self.departure)
        self._process.close(patience=0)
        _, port = split_address(self.address)
        self._began = time.monotonic()
        self._process = self._engine.start_coordinator(self._appointment | {"port": port, **changes})
        try:
            address = str(self._process.await_answer(max(self._timing.failure_timeout, LEAST_START))["address"])
            if address != self.address and self._client is not None:  # on another host
                self.address = address
                self._client.redirect(address)
            log.info("the next coordinator listens after %.2f s", time.monotonic() - self._began)
        except QuorateError as error:
            # The port may not be free yet, say. It is dead, which the next round sees and counts.
            log.warning("the next coordinator could not begin: %s", error)
            self._process.kill()
        return True

    def close(self) -> None:
        """Let it go: it ends by itself when its standard input does."""
        if self._client is not None:
            self._client.close()
        self._process.close(patience=self._timing.failure_timeout)
