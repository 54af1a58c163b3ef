"""A part of a job under faults in a process of its own, whose launcher can be killed: ``python -m quorate.api``.

It is told what to run by a pickle on standard input, from its parent, and says on standard output which run it is.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quorate.api import session
from quorate.core.fault import Fault
from quorate.observe.sinks import Sink
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Part:
    """A job under faults from its beginning; or a run that goes on."""

    resolved: ResolvedJob
    faults: tuple[Fault, ...]
    watch: session.Watch
    run: Path | None = None

    def play(self) -> None:
        """Train it here."""
        if self.run is None:
            session.start(self.resolved, self._tell_run, self.faults)
        else:
            session.resume(self.run.parent, str(self.run), os.environ, [], watch=self.watch, faults=self.faults)

    def _tell_run(self, beginning: session.Begun) -> Sink:
        print(beginning.run.path, flush=True)
        return self.watch(beginning)


@dataclass(frozen=True)
class Ending:
    """How a part ended: its exit code, negative for a signal, and its run, if it got so far."""

    code: int
    run: RunFolder | None


def play_apart(part: Part) -> Ending:
    """Train a part in a process of its own."""
    with _deaf_to_interrupts():
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "quorate.api"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            told, _ = child.communicate(pickle.dumps((sys.path, part)))
        except BaseException:
            # Whoever is told to end does not leave a job behind.
            child.terminate()
            child.wait()
            raise
    run = part.run or (Path(told.decode().strip()) if told.strip() else None)
    return Ending(child.returncode, None if run is None else RunFolder(run))


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C goes to the child as well, which stops in order."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
