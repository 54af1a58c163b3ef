"""A process that has imported what others need, and forks them: ``python -m quorate.engines.warm_process``.

This one forks coordinators and output pumps; a fork server that stays for later runs does the same with itself. What is
forked is a process of its own in every other way. A warm process has a single thread and ends with its owner.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quorate.engines.interpreters import PARENT

FORK, REAP = "fork", "reap"
LONGEST = 2**16
MOST_DESCRIPTORS = 16
STREAMS = 3
"""Of the descriptors that come with a request the first are standard input, output and error; then the working folder,
and what the program's arguments name."""


def thread_count() -> int:
    """How many threads this process has: with more than one it cannot be forked."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


class WarmProcess:
    """Serves its owner until that says so, or is gone.

    `become` runs a program, by module and arguments, in a process that was forked for it; its result is the exit code.
    `why_stale` says why nothing that is forked from here would be as a new process with this seed is; then nothing is.
    """

    def __init__(
        self,
        control: socket.socket,
        owner: int,
        become: Callable[[str, list[str]], int | None],
        why_stale: Callable[[int | None], str] = lambda _: "",
    ) -> None:
        self._control = control
        self._become = become
        self._why_stale = why_stale
        self._owner = os.pidfd_open(owner)

    def serve(self) -> NoReturn:
        """To its end: what called this is that of one run, and does not go on here."""
        try:
            self._serve()
        finally:
            os._exit(0)

    def _serve(self) -> None:
        gc.collect()
        gc.freeze()  # what is here stays as it is: children need no copy of it for the sake of their collectors
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._owner, selectors.EVENT_READ)
            while all(key.fileobj is self._control for key, _ in selector.select()):
                message, descriptors = self._receive()
                if not message:
                    break
                request = json.loads(message)
                if request["what"] == REAP:
                    self._reap(request["pid"])
                else:
                    self._fork(request, descriptors)

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, LONGEST, MOST_DESCRIPTORS)
        except OSError:
            return b"", []
        return message, descriptors

    def _answer(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the owner is gone, which the next round sees
            self._control.send(json.dumps(fields).encode())

    def _reap(self, pid: int) -> None:
        try:
            _, status = os.waitpid(pid, 0)
            self._answer(code=os.waitstatus_to_exitcode(status))
        except ChildProcessError:  # the kernel has, where the owner ignores the ends of its children
            self._answer()

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        threads = thread_count()
        refused = (
            self._why_stale(request.get("seed"))
            if threads == 1
            else f"it has {threads} threads, which a fork would lose"
        )
        pid = 0
        if not refused:
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._be(request, descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        if refused:
            self._answer(refused=refused)
        else:
            self._answer(pid=pid)

    def _be(self, request: dict[str, Any], descriptors: list[int], parent: int) -> NoReturn:
        """Be the process that was asked for."""
        code = 1
        try:
            self._control.close()
            os.close(self._owner)
            os.setsid()
            streams, folder, sockets = descriptors[:STREAMS], descriptors[STREAMS], iter(descriptors[STREAMS + 1 :])
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.fchdir(folder)
            os.close(folder)
            given: Sequence[str | None] = request["arguments"]
            words = [str(next(sockets)) if each is None else str(parent) if each == PARENT else each for each in given]
            code = self._become(request["module"], words) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()  # nobody above is left to do it: this frame ends the process
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Python would take everything apart, module by module, while the launcher waits.
            os._exit(code)


def main() -> None:
    """Fork coordinators and output pumps: the arguments are the number of the socket to the owner, and its pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    control.set_inheritable(False)
    from quorate.coordinator import __main__ as coordinator
    from quorate.engines import output_pump

    programs: dict[str, Callable[[], int | None]] = {
        "quorate.coordinator": coordinator.main,
        "quorate.engines.output_pump": output_pump.main,
    }

    def become(module: str, arguments: list[str]) -> int | None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[1:] = arguments
        return programs[module]()

    WarmProcess(control, owner, become).serve()


if __name__ == "__main__":
    main()
