"""The actor that a job has on each node of a Ray cluster: a host's agent, called by Ray.

Fork server and coordinator are programs of their own that the agent starts: nothing of Ray, which has threads, is ever
forked.
"""

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from quorate.core.networks import Network
from quorate.engines.host import HostAgent, Report
from quorate.engines.node_code import moved

COMMANDS, REPORTS, ENDS = "commands", "reports", "ends"
"""Calls of one group are carried out one after the other, in their order; those of the others do not wait for them."""


SPEAK_WITHIN = 10.0
"""Seconds within which whoever connects to a lifeline shows its token."""
RETRY = 1.0
"""Seconds until a lifeline that could not take a connection tries again."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _commands(method: Method) -> Method:
    return cast(Method, ray.method(concurrency_group=COMMANDS)(method))


def _reports(method: Method) -> Method:
    return cast(Method, ray.method(concurrency_group=REPORTS)(method))


def _ends(method: Method) -> Method:
    return cast(Method, ray.method(concurrency_group=ENDS)(method))


def host_class() -> Any:
    """What hosts are made of. They take no resources: those are held by whoever decides where workers run."""
    return ray.remote(num_cpus=0, concurrency_groups={COMMANDS: 1, REPORTS: 2, ENDS: 1})(RayHost)


class RayHost:
    """Lives as long as the process that has started it, Ray sees to that.

    Of the folder `sent` on the launcher's machine there is a copy here, in which this process stands. `environment` is
    for its workers.
    """

    def __init__(self, run_name: str, sent: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        os.environ.update(environment or {})
        self._has_ended = threading.Event()
        self._sent = sent
        self._copy = working_folder()
        network = Network(ray.util.get_node_ip_address(), host=ray.get_runtime_context().get_node_id())
        self._agent = HostAgent(run_name, network)
        self._lifeline = Lifeline(network.address)

    @_reports
    def lifeline(self) -> tuple[tuple[str, int], bytes]:
        """Where a connection ends at the moment that this process does, and the token with which it has to begin."""
        return self._lifeline.address, self._lifeline.token

    @_reports
    def next(self, arrived: int, seconds: float) -> list[tuple[int, Report]]:
        return self._agent.next(arrived, seconds)

    @_commands
    def tell(self, command: str, *arguments: Any) -> None:
        if command == "prepare" and self._sent is not None and self._copy is not None:
            arguments = (moved(arguments[0], self._sent, self._copy),)
        getattr(self._agent, command)(*arguments)

    @_commands
    def close(self) -> None:
        self._agent.close()
        self._has_ended.set()

    @_ends
    def await_end(self) -> None:
        """Wait until it was closed."""
        self._has_ended.wait()


class Lifeline:
    """Holds the connections of those who begin with its token, and says nothing. Ray itself needs seconds to learn that
    a process is gone with its node, and a kernel closes its connections at once.

    One after the other is judged. Whoever waits for that behind silent strangers is connected already, by the kernel.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_bytes(32)
        self._server = socket.create_server((host, 0))
        self._held: list[socket.socket] = []
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, name="lifeline", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._held = [held for held in self._held if _is_there(held)]
            try:
                connection = self._server.accept()[0]
            except OSError:  # too many files are open, say
                time.sleep(RETRY)
                continue
            if self._is_ours(connection):
                connection.setblocking(False)
                self._held.append(connection)
            else:
                connection.close()

    def _is_ours(self, connection: socket.socket) -> bool:
        connection.settimeout(SPEAK_WITHIN)
        try:
            return hmac.compare_digest(connection.recv(len(self.token)), self.token)
        except OSError:
            return False


def _is_there(connection: socket.socket) -> bool:
    """Whether whoever is held has not hung up: it has nothing more to say. It is closed if it has."""
    try:
        if connection.recv(1):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def working_folder() -> Path | None:
    """Where this process stands; None where that folder is gone, as Ray may leave it when several nodes share a
    machine and so its folder of copies. Those have the task where it was written, if anywhere."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        os.chdir("/")  # what it starts could not begin in a folder that is not there
        return None
