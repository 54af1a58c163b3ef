"""The fork server: a process that has imported torch and the task once, and forks workers that need not do it again.

Importing torch is most of everybody's start-up time. The fork server runs with one OpenMP and BLAS thread and forks
only while it has a single thread: a fork after an operation on two threads leaves the child waiting for a thread that
does not exist. Otherwise workers are spawned, and the log says why.

What the code of the task starts in a worker, and leaves there, becomes a child of the fork server when its own parent
is gone, and is ended with the worker: nothing outlives the job. Where the fork server itself is killed, the launcher
ends what is in the process groups of its workers.
"""

import contextlib
import functools
import json
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quorate.core.addresses import enter_network
from quorate.core.errors import QuorateError
from quorate.core.failure import Failure
from quorate.core.generation import name_of
from quorate.core.log_records import Place, log_by_stderr
from quorate.core.processes import (
    adopt_orphans,
    children_of,
    close_in_children,
    die_with_parent,
    keep_in_children,
    show_as,
)
from quorate.core.task_source import TaskSource
from quorate.core.user_code import describe, refuse_breakpoints
from quorate.engines.engine import SOURCE, Prepared
from quorate.engines.fork_template import Stay, thread_count
from quorate.worker.assignment import Assignment

log = logging.getLogger("quorate.engines.fork_server")  # it is __main__ to itself

PREPARE, READY, FAILED = "prepare", "ready", "failed"
START, STARTED, EXITED = "start", "started", "exited"
_LOOKS_AT_SEED = re.compile(rb"initial_seed|get_?state|get_rng_state")
"""A module may know the seed without drawing."""
REAP_EVERY = 5.0
"""Seconds between two looks at what workers that live have left, and has ended."""


class Messages:
    """One end of the conversation of launcher and fork server: JSON lines over a socket pair that only they hold."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        # What came beside the messages, in the order of these.
        self.descriptors: deque[int] = deque()
        self._partial = b""
        self.closed = False

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, what: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Say something; the other side may be gone, which is learnt by reading."""
        message = json.dumps({"what": what, **fields}).encode() + b"\n"
        try:
            sent = socket.send_fds(self.connection, [message], descriptors)
            self.connection.sendall(message[sent:])
        except OSError:
            self.closed = True

    def read(self) -> Iterator[dict[str, Any]]:
        """What has arrived. `closed` is set at the end of the conversation."""
        try:
            received, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
            self.descriptors.extend(descriptors)
        except OSError:
            received = b""
        if not received:
            self.closed = True
        *lines, self._partial = (self._partial + received).split(b"\n")
        return (json.loads(line) for line in lines)

    def end(self) -> None:
        """Say nothing more, which the other side takes for the end; what it still says can be read."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.connection.close()


@dataclass(frozen=True)
class _Child:
    """A worker, or without a slot something that a worker has left."""

    slot: int | None
    pid: int


def unprepared(error: Exception) -> Failure:
    """Why a task cannot be prepared, by what was raised."""
    if isinstance(error, QuorateError):
        return Failure.of(error)
    traceback.print_exc()
    return Failure("InternalError", f"Quorate failed: {describe(error)}", traceback=traceback.format_exc())


class ImportedTask:
    """The task, imported as a preparation says, with everything else that a worker will import."""

    def __init__(self, message: dict[str, Any]) -> None:
        from quorate.data.streams import have_drawn_since
        from quorate.replica.device import CPU
        from quorate.task.source import import_seed, load_task_type
        from quorate.worker import process  # noqa: F401

        self.search_path: list[str] = message["search_path"]
        sys.path[:] = [*self.search_path, *(entry for entry in sys.path if entry not in self.search_path)]
        CPU.pin(1, message["deterministic"])
        self.seed: int = message["seed"]
        self.type = load_task_type(message["task"], self.seed)
        # Most modules draw nothing when they are imported: then they are the same with any seed.
        self.draws = have_drawn_since(import_seed(self.seed))

    def finish_imports(self) -> None:
        """What takes long, and so comes last: a mistake in the task is told without this wait."""
        import torch._dynamo  # noqa: F401 (the first optimizer step imports it, which takes as long as torch itself)

    def check(self, message: dict[str, Any]) -> None:
        """Refuse parameters that do not fit."""
        from quorate.task.task import configure

        configure(self.type, message["params"], message["job_source"], message["seed"])

    def found(self, message: dict[str, Any]) -> Prepared:
        """What the bits depend on here, and what the task names."""
        from quorate.replica.device import CPU
        from quorate.task.source import imported_versions
        from quorate.task.task import callbacks_of

        facts = CPU.facts(message["threads"], message["deterministic"])
        if message["device"] != CPU.name:
            # Workers tell of it: who forks must not have spoken to its driver.
            facts |= {"device": message["device"]}
        del facts["precision"]  # the job's own, and with `auto` that of the chip
        source = self.source()
        facts |= {f"library {name}": version for name, version in imported_versions(source).items()}
        return Prepared(facts | {SOURCE: source.digest}, source, tuple(callbacks_of(self.type)))

    def source(self) -> TaskSource:
        from quorate.task.source import task_source

        return task_source(self.type)

    def why_stale(self, seed: int | None) -> str:
        """Why a new process would have another task, if it would."""
        from quorate.task.source import changed_file

        if seed != self.seed and (self.draws or any(map(_LOOKS_AT_SEED.search, self.source().files.values()))):
            return f"its module draws numbers when it is imported, and the seed was {self.seed}"
        changed = changed_file(self.type)
        return "" if changed is None else f"{changed} has changed"


class ForkServer:
    """Serves the launcher until the launcher closes the conversation or dies, which is the same to the fork server."""

    def __init__(self, messages: Messages, task: ImportedTask | None = None, stay: Stay | None = None) -> None:
        self._messages = messages
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        # What importing the task has started is its own business, and ends as it likes.
        self._own: frozenset[int] = frozenset()
        self._gone: set[int] = set()
        self._task = task
        self._stay = stay
        # What lanes keep from step to step outlives their workers here. It takes no room until one of them needs it.
        self._lane_memory = os.memfd_create("quorate-lanes", os.MFD_CLOEXEC)

    def serve(self) -> None:
        """Until the launcher is gone; then nothing of ours is left."""
        self._selector.register(self._messages, selectors.EVENT_READ)
        reap_at = 0.0
        try:
            while not self._messages.closed:
                for key, _ in self._selector.select(REAP_EVERY):
                    if key.fileobj is not self._messages:
                        self._reap(key.fd)
                        continue
                    for message in self._messages.read():
                        if message["what"] == PREPARE:
                            self.prepare(message)
                        elif message["what"] == START:
                            self._start(Assignment.from_json(message["assignment"]))
                if time.monotonic() >= reap_at:
                    self._reap_left()
                    reap_at = time.monotonic() + REAP_EVERY
        finally:
            self._kill()

    def prepare(self, message: dict[str, Any]) -> None:
        """Have all imported that workers need, and say what was found."""
        try:
            if self._task is None:
                self._task = ImportedTask(message)
                self._remain(self._task)
            self._task.check(message)
            self._task.finish_imports()
            found = self._task.found(message)
            if message.get("identify") and thread_count() == 1:  # a fork can find it out
                from quorate.worker.identify import identity_in_child

                identity = identity_in_child(self._task.type, message["identify"], message["job_source"])
                found = replace(found, identity=identity)
            source = None if found.source is None else found.source.to_page()
            self._messages.send(READY, **vars(found) | {"source": source, "pid": os.getpid()})
        except Exception as error:
            self._messages.send(FAILED, failure=unprepared(error).to_dict())

    def _remain(self, task: ImportedTask) -> None:
        """Where that is asked for, stay as a process that has imported the task and nothing else, while a fork of it
        goes on here. A task that has started threads, which a fork would lose, is for this run alone."""
        stay, self._stay = self._stay, None
        if stay is None:
            return
        task.source()  # at once: an edit that comes later is found to be one
        task.finish_imports()
        if thread_count() > 1:
            stay.control.close()
            return
        parent, connection = os.getpid(), self._messages.connection
        keep_in_children(connection)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork():
            connection.close()
            self._selector.close()
            os.close(self._lane_memory)
            stay.serve(functools.partial(serve_run, task), task.why_stale)
        close_in_children(connection)
        os.setsid()
        die_with_parent(parent)
        adopt_orphans()

    def _start(self, assignment: Assignment) -> None:
        if not self._children and not self._gone:
            self._own = frozenset(children_of(os.getpid()))
        assignment = replace(assignment, lane_memory=self._lane_memory)
        threads = thread_count()
        pipes = self._messages.descriptors.popleft(), self._messages.descriptors.popleft()
        if threads == 1:
            pid, how, reason = self._fork(assignment, pipes), "forked", ""
        else:
            pid, how = self._spawn(assignment, pipes), "spawned"
            more = "a thread" if threads == 2 else f"{threads - 1} threads"
            reason = f"importing the task started {more}, which a fork would lose"
        log.info("%s is process %d, %s%s", name_of(assignment.slot), pid, how, f": {reason}" if reason else "")
        for descriptor in pipes:
            os.close(descriptor)
        self._gone.discard(pid)
        self._watch(_Child(assignment.slot, pid))
        self._messages.send(STARTED, slot=assignment.slot, pid=pid, how=how, reason=reason)

    def _watch(self, child: _Child) -> None:
        descriptor = os.pidfd_open(child.pid)
        self._children[descriptor] = child
        self._selector.register(descriptor, selectors.EVENT_READ)

    def _fork(self, assignment: Assignment, pipes: tuple[int, int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        fork_server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            for number, end in enumerate(pipes, start=1):
                os.dup2(end, number)
            self._selector.close()
            for descriptor in (*pipes, *self._messages.descriptors, *self._children):
                os.close(descriptor)
            die_with_parent(fork_server)
            os.setpgid(0, 0)  # by which the fork server knows whatever this worker leaves
            assert self._task is not None, "whoever starts workers is prepared"
            code = become_worker(assignment, self._task.type)
        except BaseException:
            traceback.print_exc()  # nobody above is left to do it: this frame ends the process
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _spawn(self, assignment: Assignment, pipes: tuple[int, int]) -> int:
        # With -P and this path, imports are found where a forked worker finds them: the working directory does not
        # come first.
        path = os.pathsep.join([] if self._task is None else self._task.search_path)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "quorate.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=pipes[0],
            stderr=pipes[1],
            env=os.environ | {"PYTHONPATH": path},
            process_group=0,
            pass_fds=(self._lane_memory,),
        )
        assert child.stdin is not None
        child.stdin.write(assignment.to_json().encode() + b"\n")
        child.stdin.close()
        child.returncode = 0  # reaped here by its pid; Popen must not complain that it was not waited for
        return child.pid

    def _reap(self, descriptor: int) -> None:
        child = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child.pid, 0)
        if child.slot is not None:
            self._messages.send(EXITED, slot=child.slot, pid=child.pid, code=os.waitstatus_to_exitcode(status))
            self._gone.add(child.pid)
        # Again for one that was left: what that has left has come to us only now.
        self._end(lambda group: group in self._gone)

    def _reap_left(self) -> None:
        """What a worker that lives has left comes to us while it runs, as by a double fork, and we alone can reap it.

        Without this a task that calls `os.system("command &")` at every step would use up all numbers of processes.
        """
        # Asked first whether there is anybody, since to find who may take a look at every process of the machine.
        with contextlib.suppress(ChildProcessError):  # there are no children
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                for pid in children_of(os.getpid()).keys() - self._known():
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)

    def _known(self) -> frozenset[int]:
        return self._own | {child.pid for child in self._children.values()}

    def _end(self, is_left: Callable[[int], bool]) -> None:
        """Kill what workers have left, which is in process groups of theirs; another call reaps it."""
        known = self._known()
        for pid, group in children_of(os.getpid()).items():
            if pid not in known and is_left(group):
                # It cannot have become another process: a child keeps its number until we have reaped it.
                os.kill(pid, signal.SIGKILL)
                self._watch(_Child(None, pid))

    def _kill(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        ours = os.getpgrp()
        while True:
            for descriptor in list(self._children):
                self._reap(descriptor)
            # Also what has left its worker's group: all but what importing the task has started.
            self._end(lambda group: group != ours)
            if not self._children:
                return


def become_worker(assignment: Assignment, task_type: Any) -> int:
    """What a forked child does with its life; its exit code."""
    from quorate.worker.process import Worker, start_log

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_log(assignment)
    if assignment.network.namespace:
        enter_network(assignment.network.namespace)  # before anything opens a socket
    worker = Worker(assignment, task_type)
    worker.leave_when_terminated()
    return worker.live()


def serve_run(
    task: ImportedTask | None, run: str, messages: socket.socket, parent: int, stay: Stay | None = None
) -> None:
    """Serve the launcher of one run to its end. `parent` is the process that this one ends with."""
    die_with_parent(parent)
    adopt_orphans()
    refuse_breakpoints()
    log_by_stderr(Place("fork server", run), "info")
    show_as("fork server", run)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for sock in (messages, *(() if stay is None else (stay.control,))):
        # Whoever waits for the end of the fork server must not wait for what importing the task has started.
        sock.set_inheritable(False)
        close_in_children(sock)
    ForkServer(Messages(messages), task, stay).serve()


def main() -> None:
    """Serve the launcher: the arguments are its pid, the name of the run, and the number of the socket to it; and where
    it is to stay, that of the socket by which it is asked for more."""
    launcher, run, messages, *control = sys.argv[1:]
    stay = Stay(socket.socket(fileno=int(control[0])), int(launcher)) if control else None
    serve_run(None, run, socket.socket(fileno=int(messages)), int(launcher), stay)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would take torch apart, module by module, for a second or two, while the launcher waits.
    os._exit(0)


if __name__ == "__main__":
    main()
