"""A fork server that stays for later runs: a process that has imported a task, and forks the fork server of each.

It forks their coordinators as well. What is forked is a process of its own in every other way.
"""

import contextlib
import functools
import gc
import json
import logging
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from quorate.core.processes import outlive_parent, show_as

LONGEST = 2**16
MOST_DESCRIPTORS = 5
STREAMS = 3
"""Of the descriptors that come with a request the first are standard input, output and error; then the working folder
and, for a fork server, the socket to its launcher."""

ServeRun = Callable[[str, socket.socket, int], None]
"""Serves a run, by its name and the socket to its launcher, in a process that was forked for it by that of this pid."""


def thread_count() -> int:
    """How many threads this process has: with more than one it cannot be forked."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


@dataclass(frozen=True)
class Stay:
    """What a fork server is told that stays: by which socket it is asked for others, and by whom.

    `why_stale` says why a new process with this seed would have another task; then no fork server is forked.
    """

    control: socket.socket
    owner: int

    def serve(self, serve_run: ServeRun, why_stale: Callable[[int], str]) -> NoReturn:
        """Be nobody's process until the next run, to the end of the owner."""
        try:
            self._let_go()
            self._serve(serve_run, why_stale)
        finally:
            os._exit(0)  # what called this is that of one run, and does not go on here

    def _let_go(self) -> None:
        outlive_parent()  # it is a thread, which may end with the run
        null = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(null, number)
        os.close(null)
        logging.getLogger().handlers.clear()  # no more to the log of this run
        show_as("fork server that waits for the next run", "")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is forked

    def _serve(self, serve_run: ServeRun, why_stale: Callable[[int], str]) -> None:
        from quorate.coordinator import __main__ as coordinator

        gc.collect()
        gc.freeze()  # what is here stays as it is: children need no copy of it for the sake of their collectors
        own, owner = os.getpid(), os.pidfd_open(self.owner)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(owner, selectors.EVENT_READ)
            while all(key.fileobj is self.control for key, _ in selector.select()):
                message, descriptors, _, _ = socket.recv_fds(self.control, LONGEST, MOST_DESCRIPTORS)
                if not message:
                    break
                request = json.loads(message)  # for a run its name and seed; nothing for a coordinator
                refused = why_stale(request["seed"]) if request else ""
                if (threads := thread_count()) > 1:
                    refused = f"it has {threads} threads, which a fork would lose"
                pid = 0 if refused else os.fork()
                if not refused and pid == 0:
                    os.close(owner)
                    selector.close()
                    begun = functools.partial(_be, descriptors[: STREAMS + 1])
                    if request:
                        messages = socket.socket(fileno=descriptors[-1])
                        begun(lambda: serve_run(request["run"], messages, own))  # noqa: B023
                    begun(coordinator.main)
                for descriptor in descriptors:
                    os.close(descriptor)
                with contextlib.suppress(OSError):  # the owner is gone, which the next round sees
                    self.control.send(json.dumps({"refused": refused} if refused else {"pid": pid}).encode())


def _be(descriptors: list[int], program: Callable[[], object]) -> NoReturn:
    """Be another process, with these as standard input, output and error, and working folder."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, stream in enumerate(descriptors[:STREAMS]):
            os.dup2(stream, number)
        os.fchdir(descriptors[STREAMS])
        for descriptor in descriptors:
            os.close(descriptor)
        program()
        code = 0
    except BaseException:
        traceback.print_exc()  # nobody above is left to do it: this frame ends the process
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Python would take everything apart, module by module, while the launcher waits.
        os._exit(code)
