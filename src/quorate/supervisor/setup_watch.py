"""Processes that are being set up: users are notified while it takes long, and only `setup_timeout` ends it.

Downloading or tokenising a dataset may take hours, and nobody but the user knows how many. What helps is to know what
is waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quorate.core.generation import name_of, names_of

FIRST_NOTICE = 15.0
"""Seconds in one phase before users are notified; again after three times as long, and so on."""
TIMES_LONGER = 3
LONGEST_GAP = 3600.0
"""Seconds between two notices at most."""

FORK_SERVER = -1
"""In the place of a worker: the process that imports torch and the task for all of them."""
IMPORTING = ""
"""The phase of a process that has not said anything yet."""

_WORDS = {
    IMPORTING: "the import of torch and the task",
    "start": "its start",
    "build": "its start",
    "restore": "the loading of its checkpoint",
    "fingerprint": "the fingerprint of its data",
    "metrics()": "a trial of metrics()",
    "compile": "the compilation of its model, which takes a minute the first time",
    "register": "its registration with the coordinator",
}
_DOING = {
    IMPORTING: "importing torch and the task",
    "start": "starting",
    "build": "starting",
    "restore": "loading the checkpoint",
    "fingerprint": "reading the data once for its fingerprint",
    "metrics()": "trying metrics()",
    "compile": "compiling the model, which takes a minute the first time",
    "register": "registering with the coordinator",
}


@dataclass(frozen=True)
class Setup:
    """One process on its way: since when, in which phase, since when in that, and when the next notice is due."""

    worker: int
    pid: int
    began: float
    phase: str
    entered: float
    notice_at: float

    def noticed(self, now: float) -> "Setup":
        """After a notice: the longer it takes, the longer until the next."""
        return replace(self, notice_at=now + min((TIMES_LONGER - 1) * (now - self.entered), LONGEST_GAP))

    def overdue(self, now: float, limit: float) -> str:
        """What is wrong with a setup that takes longer than the user allows."""
        who = _name([self.worker]) + (f" (pid {self.pid})" if self.pid else "")
        return (
            f"{who} is still in {in_words(self.phase)}, {now - self.began:.0f} s after its start. That is longer than"
            f" setup_timeout ({limit})"
        )


class SetupWatch:
    """Looked at now and then, with the time and the phase of every process that is being set up, by worker and pid."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._setups: dict[tuple[int, int], Setup] = {}

    def look(self, now: float, phases: Mapping[tuple[int, int], str]) -> list[str]:
        """The notices that are due; those in the same phase share one."""
        self._setups = {process: self._at(process, phase, now) for process, phase in phases.items()}
        due = [setup for setup in self._setups.values() if now >= setup.notice_at]
        notices = []
        for phase in dict.fromkeys(setup.phase for setup in due):
            alike = [setup for setup in self._setups.values() if setup.phase == phase]
            seconds = now - min(setup.entered for setup in alike)
            notices.append(f"{_name([setup.worker for setup in alike])}: still in {in_words(phase)}, {seconds:.0f} s")
            for setup in alike:
                self._setups[setup.worker, setup.pid] = setup.noticed(now)
        return notices

    def overdue(self, now: float) -> list[Setup]:
        """Those that take longer than the user allows."""
        return [setup for setup in self._setups.values() if self.limit is not None and now - setup.began >= self.limit]

    def _at(self, process: tuple[int, int], phase: str, now: float) -> Setup:
        known = self._setups.get(process)
        if known is None:
            return Setup(*process, now, phase, now, now + FIRST_NOTICE)
        return known if known.phase == phase else replace(known, phase=phase, entered=now, notice_at=now + FIRST_NOTICE)


def in_words(phase: str) -> str:
    """A phase of a setup as a sentence names it; what the task defines has its own name."""
    return _WORDS.get(phase, phase)


def doing_in_words(phase: str) -> str:
    """A phase of a setup as what a job is busy with."""
    return _DOING.get(phase, f"running {phase}")


def _name(workers: list[int]) -> str:
    if workers == [FORK_SERVER]:
        return "the fork server"
    if len(workers) == 1:
        return name_of(workers[0])
    return names_of(workers)
