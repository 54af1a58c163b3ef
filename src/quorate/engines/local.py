"""The local engine: worker processes on this machine, forked by a fork server that has imported torch and the task."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quorate.core.addresses import LOOPBACK, Network, refuse_unreachable
from quorate.core.failure import Failure
from quorate.core.generation import ENDED_FOR_A_STOP, name_of
from quorate.core.machine import usable_cores
from quorate.core.processes import StoppedProcesses, children_of, describe_departure, members_of
from quorate.core.task_source import TaskSource
from quorate.engines.engine import (
    Capacity,
    Exited,
    Interrupted,
    Notice,
    Preparation,
    Prepared,
    Ready,
    Remark,
    SettingUp,
    Started,
    Unprepared,
)
from quorate.engines.fork_server import EXITED, FAILED, PREPARE, READY, START, STARTED, Messages
from quorate.engines.output_pump import OpenLog, OutputPump, Pipes, close_all
from quorate.engines.warm import CoordinatorChildProcess, ForkedProcess, KeptForkServer, Program
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment
from quorate.worker.status import announce_start, read_status, status_file

log = logging.getLogger(__name__)

# The same for every worker, on every machine: the bits depend on how many threads a kernel uses, and a hash seed
# decides the order of sets.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    "GRPC_ENABLE_FORK_SUPPORT": "false",
}

# What a step frees the next one needs again. By default both allocators (torch has mimalloc on ARM, glibc's elsewhere)
# give it back to the kernel at once, and thousands of pages are mapped and cleared again in every step. A user's own
# settings come first.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MIMALLOC_PURGE_DELAY": "1000",
}

CLOSE_PATIENCE = 5.0
GLANCE = 0.5
"""Seconds between two looks at who is stopped, or fewer where `failure_timeout` is short."""

COORDINATOR = -1
"""The coordinator's place, where the network of a worker's is asked for as well."""


StartForkServer = Callable[[str, socket.socket, tuple[int, int], Mapping[str, str], Preparation], Program]
"""Starts the fork server of a run of this name, with this end of the conversation, these as standard output and error,
and this environment, in a session of its own: Ctrl-C is for the launcher alone."""


def start_fork_server(
    run: str,
    messages: socket.socket,
    streams: tuple[int, int],
    environment: Mapping[str, str],
    preparation: Preparation,  # noqa: ARG001 (it is told)
    *more: socket.socket,
) -> "subprocess.Popen[bytes]":
    """A new interpreter; `more` are further sockets that it is given."""
    numbers = [sock.fileno() for sock in (messages, *more)]
    program = [sys.executable, "-P", "-m", "quorate.engines.fork_server", str(os.getpid()), run]
    return subprocess.Popen(
        [*program, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        pass_fds=numbers,
        env=environment,
        start_new_session=True,
    )


class LocalEngine:
    """Starts a fork server at once, and another when one dies: its workers die with it.

    `network_of` gives the network of each place, a worker's slot or COORDINATOR. `open_log` opens the logs of what is
    printed, if those are not files of the run.
    """

    def __init__(
        self,
        run: RunFolder,
        preparation: Preparation,
        network_of: Callable[[int], Network] = lambda _place: LOOPBACK,
        fork_servers: StartForkServer = start_fork_server,
        open_log: OpenLog | None = None,
    ) -> None:
        self._run = run
        self._preparation = preparation
        self._network_of = network_of
        self._fork_servers = fork_servers
        if not network_of(COORDINATOR).namespace:
            # Without it a job would lose one coordinator after the other, and never say why.
            refuse_unreachable(network_of(COORDINATOR).address)
        self._is_ready = False
        # Each with the pipes of what it will print.
        self._starting: dict[int, tuple[Assignment, Pipes]] = {}
        self._running: dict[int, int] = {}
        self._set_up: set[int] = set()
        self._is_closed = False
        self._ended: set[int] = set()
        self._stopped = StoppedProcesses(preparation.failure_timeout)
        self._stopped_due = 0.0
        self._pump = OutputPump(run, open_log)
        self._fork_server = self._start_fork_server()

    def capacity(self) -> Capacity:
        return Capacity(usable_cores())

    def start_coordinator(self, appointment: Mapping[str, Any]) -> CoordinatorChildProcess:
        return CoordinatorChildProcess(appointment, self._network_of(COORDINATOR), self._fork_server.fork_coordinator)

    def start(self, assignment: Assignment) -> None:
        placed = replace(assignment, network=self._network_of(assignment.slot))
        announce_start(status_file(self._run, placed.slot))
        self._send(placed)

    def poll(self, seconds: float) -> list[Notice]:
        notices = [notice for message in self._fork_server.read(seconds) for notice in self._noted(message)]
        if self._fork_server.messages.closed:
            notices += self._replace_fork_server()
        return [*notices, *self._setups(), *self._end_stopped(time.monotonic())]

    def kill(self, slot: int, pid: int) -> None:  # noqa: ARG002 (a pid says it all on one machine)
        self._fork_server.workers.signal(pid, signal.SIGKILL)

    def terminate(self, slot: int, pid: int) -> None:  # noqa: ARG002
        self._fork_server.workers.signal(pid, signal.SIGTERM)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._fork_server.close()
            for _, pipes in self._starting.values():
                close_all(pipes.read_ends)
            self._pump.close()

    def _start_fork_server(self) -> "ForkServerProcess":
        return ForkServerProcess(self._run, self._preparation, self._pump, self._fork_servers)

    def _send(self, assignment: Assignment) -> None:
        pipes = Pipes.open()
        self._starting[assignment.slot] = assignment, pipes
        self._fork_server.messages.send(START, pipes.write_ends, assignment=assignment.to_json())
        close_all(pipes.write_ends)

    def _noted(self, message: dict[str, Any]) -> Iterator[Notice]:
        if message["what"] == STARTED:
            slot, pid = message["slot"], message["pid"]
            if slot in self._starting:
                assignment, pipes = self._starting.pop(slot)
                self._pump.read(pipes, pid, slot, assignment.secrets)
            self._running[slot] = pid
            reason = f" ({message['reason']})" if message["reason"] else ""
            yield Started(slot, pid, message["how"] + reason)
        elif message["what"] == EXITED:
            yield self._gone(message["slot"], message["pid"], message["code"])
        elif message["what"] == FAILED:
            yield Unprepared(Failure.from_dict(message["failure"]))
        elif not self._is_ready:  # of the first one: what another finds later is the same
            self._is_ready = True
            source = None if message["source"] is None else TaskSource.from_json(message["source"])
            callbacks = tuple(message.get("callbacks", ()))
            yield Ready(Prepared(message["facts"], source, callbacks, message.get("identity")))

    def _gone(self, slot: int, pid: int, code: int) -> Exited:
        self._running.pop(slot, None)
        self._set_up.discard(pid)
        if pid in self._ended:
            self._ended.discard(pid)
            code = ENDED_FOR_A_STOP
        return Exited(slot, pid, code, read_status(status_file(self._run, slot)))

    def _setups(self) -> Iterator[SettingUp]:
        """Who is there and says nothing may have trained for days: on a full disk there is no page to say it on."""
        for slot, pid in self._running.items():
            status = None if pid in self._set_up else read_status(status_file(self._run, slot))
            if status is not None and status.is_new:
                yield SettingUp(slot, pid, status.phase)
            elif status is not None:
                self._set_up.add(pid)
                yield SettingUp(slot, pid, None)

    def _end_stopped(self, now: float) -> list[Remark]:
        """Who is stopped has a clock only here, as long as the coordinator does not know it: what is computed before
        that may take hours."""
        if now < self._stopped_due:
            return []
        self._stopped_due = now + min(GLANCE, self._preparation.failure_timeout / 10)
        new = {pid: slot for slot, pid in self._running.items() if pid not in self._set_up}
        parents = {child: pid for pid in new for child in children_of(pid)}  # such as reads the data's fingerprint
        fork_server = self._fork_server.pid
        told = []
        for pid, seconds in self._stopped.look(now, [fork_server, *new, *parents]).items():
            what = f"is stopped (SIGSTOP), and has been for {seconds:.1f} s"
            if pid == fork_server:
                told.append(f"the fork server (pid {pid}) {what}: {self._fork_server.end_stop(bool(self._running))}")
            else:
                worker = parents.get(pid, pid)
                told.append(self._end_stopped_worker(new[worker], worker, pid, what))
        return [Remark(message) for message in told]

    def _end_stopped_worker(self, slot: int, pid: int, stopped: int, what: str) -> str:
        """One that is stopped itself, or in a process that it has started; what is told of it."""
        self._ended.add(pid)
        self.kill(slot, pid)
        child = f", of which process {stopped}" if stopped != pid else ""
        status = read_status(status_file(self._run, slot))
        phase = "" if status is None else f", in `{status.phase}`"
        return f"{name_of(slot)} (pid {pid}){child} {what}{phase}: it is ended, and another is started"

    def _replace_fork_server(self) -> list[Notice]:
        departure = self._fork_server.departure()
        if not self._is_ready and self._fork_server.was_stopped:
            self._fork_server.close()
            self._fork_server = self._start_fork_server()
            return []
        if not self._is_ready:
            log_file = self._run.logs / "fork_server.jsonl"
            return [Interrupted(f"{departure} while it imported the task; its log is {log_file}.")]
        self._fork_server.close()
        exits = [self._gone(slot, pid, -signal.SIGKILL) for slot, pid in list(self._running.items())]
        self._fork_server = self._start_fork_server()
        for assignment, pipes in list(self._starting.values()):
            close_all(pipes.read_ends)
            self._send(assignment)
        return [Interrupted(f"{departure}, and the workers with it"), *exits]


class ForkServerProcess:
    """The fork server's process, as the launcher holds it. Ends with the launcher, and all workers with it."""

    def __init__(self, run: RunFolder, preparation: Preparation, pump: OutputPump, start: StartForkServer) -> None:
        self._is_ready = False
        self._is_reaped = False
        self._code: int | None = None
        self.was_stopped = False
        self.workers = Pidfds()
        ours, theirs = socket.socketpair()
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_THREAD_LIMIT"}
        pipes = Pipes.open()
        environment = ALLOCATOR | inherited | ENVIRONMENT
        with theirs:
            self._process = start(run.name, theirs, pipes.write_ends, environment, preparation)
        close_all(pipes.write_ends)
        pump.read(pipes, self._process.pid)
        # The numbers of its workers, and so of the process groups of whatever they have started.
        self._groups: set[int] = set()
        self.pid = self._process.pid
        self._end = os.pidfd_open(self.pid)
        self.messages = Messages(ours)
        self.messages.send(PREPARE, **vars(preparation))

    def end_stop(self, has_workers: bool) -> str:
        """Have one that is stopped go on, or end it where nobody would end with it; what was done, in words."""
        if has_workers:
            # One that a warm process has forked is that one's to reap: its number may be another's by now.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, signal.SIGCONT)
            return "it is continued, since its workers would end with it"
        self.was_stopped = True
        self._process.kill()
        return "another takes its place"

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """What it tells, of each worker that was asked for its start and its end; waits that long for something."""
        if not select.select([self.messages.connection], [], [], seconds)[0]:
            return []
        messages = list(self.messages.read())
        for message in messages:
            if message["what"] == STARTED:
                self.workers.add(message["pid"])
                self._groups.add(message["pid"])
            elif message["what"] == EXITED:
                self.workers.discard(message["pid"])
            elif message["what"] == READY:
                self._is_ready = True
                # One that stays for later runs has forked another for this one: that is the fork server from now on.
                pid = message.get("pid", self.pid)
                if pid != self.pid and isinstance(self._process, KeptForkServer):
                    self._process, self.pid = self._process.forked(pid), pid
                    os.close(self._end)
                    self._end = os.pidfd_open(pid)
        return messages

    def fork_coordinator(self, streams: Sequence[int]) -> Program | None:
        """A coordinator from where this one is from, if that forks more."""
        return self._process.beside(streams) if isinstance(self._process, ForkedProcess) else None

    def departure(self) -> str:
        """How it has ended; waits until it has."""
        if not select.select([self._end], [], [], CLOSE_PATIENCE)[0]:
            self._process.kill()  # it says nothing more, and is stopped, or hangs at its end
            select.select([self._end], [], [])
        ended = describe_departure(self._reap())
        return f"the fork server (pid {self._process.pid}), which starts the workers, {ended}"

    def close(self) -> None:
        """End the fork server and whatever it still has, and wait until they are gone."""
        self.messages.end()
        if not self._is_ready:
            # User code that is being imported does not listen, and has no workers yet that could be left behind.
            self._process.kill()
        if not select.select([self._end], [], [], CLOSE_PATIENCE)[0]:
            self._process.kill()  # the kernel ends the workers with it
            select.select([self._end], [], [])
        # Of workers that were started last. It does not wait: what the user's code has forked may hold the socket.
        while not self.messages.closed and select.select([self.messages], [], [], 0)[0]:
            self.read(0)
        self.messages.close()
        self._reap()
        os.close(self._end)
        # Only the fork server can reap them. Whoever holds the run's lock must not let go of it while one still writes.
        left = self.workers.await_end(CLOSE_PATIENCE)
        if left:
            log.warning("workers still end after %s s: processes %s", CLOSE_PATIENCE, ", ".join(map(str, left)))
        self.workers.close()

    def _reap(self) -> int | None:
        """Take note of its end, and of its exit code.

        First end what its workers have started and left: it did so itself, unless it was killed. As long as the fork
        server is not reaped its number is that of its session and of no other: nobody else's process is taken for ours.
        """
        over = time.monotonic() + CLOSE_PATIENCE
        while not self._is_reaped and self._groups and time.monotonic() < over:
            found = members_of(self._process.pid, self._groups)
            if not found:
                break
            left = Pidfds()
            for pid in found:
                left.add(pid)
            for pid in found & members_of(self._process.pid, self._groups):
                left.signal(pid, signal.SIGKILL)
            left.await_end(over - time.monotonic())
            left.close()
        if not self._is_reaped:
            self._code = self._process.wait()
            self._is_reaped = True
        return self._code


class Pidfds:
    """Processes that somebody else has started. A descriptor, unlike a pid, never comes to mean another one."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Watch a process; one that is gone already is not watched."""
        try:
            self._descriptors[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return

    def discard(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid, None)
        if descriptor is not None:
            os.close(descriptor)

    def signal(self, pid: int, number: int) -> None:
        descriptor = self._descriptors.get(pid)
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                signal.pidfd_send_signal(descriptor, number)

    def await_end(self, seconds: float) -> list[int]:
        """Wait until all have ended, for so many seconds at most; the pids of those that have not."""
        over = time.monotonic() + seconds
        while self._descriptors:
            remaining = max(0.0, over - time.monotonic())
            ended, _, _ = select.select(list(self._descriptors.values()), [], [], remaining)
            for pid in [pid for pid, descriptor in self._descriptors.items() if descriptor in ended]:
                self.discard(pid)
            if not ended and not remaining:
                break
        return sorted(self._descriptors)

    def close(self) -> None:
        for pid in list(self._descriptors):
            self.discard(pid)
