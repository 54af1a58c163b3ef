"""How much memory a process takes with all that it has started, while it works."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

PAUSE = 0.01
"""Seconds between two looks: what comes and goes in between is not seen."""


class MemoryWatch(threading.Thread):
    """Looks again and again, until it is told that it is over. `samples` are moments and bytes.

    To look at so much memory takes milliseconds of a core: what is trained meanwhile is not to be timed.
    """

    def __init__(
        self,
        over: Callable[[], bool],
        clock: Callable[[], float],
        pause: float = PAUSE,
        measure: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(name="memory", daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._over = over
        self._clock = clock
        self._pause = pause
        self._measure = memory_of_family if measure is None else measure
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look, the last time when it is over."""
        is_over = False
        while not is_over and not self._stopped.wait(self._pause):
            is_over = self._over()
            self.samples.append((self._clock(), self._measure(os.getpid())))

    def stop(self) -> None:
        """Whatever is left to see; it returns when nobody looks any more."""
        self._stopped.set()
        self.join()


def peak_memory(samples: Sequence[tuple[float, int]], began: float, ended: float) -> int:
    """The most in this time. The next look is one at it, too: what is quicker than a look leaves its traces."""
    meanwhile = [taken for moment, taken in samples if began <= moment <= ended]
    after = [taken for moment, taken in samples if moment > ended][:1]
    if not meanwhile and not after:
        raise ValueError("nobody has looked at the memory in time: the machine is too busy to measure anything")
    return max(meanwhile + after)


def memory_of_family(process: int) -> int:
    """Bytes of a process and its descendants. What several of them share counts once."""
    return sum(proportional_memory(member) for member in family_of(process))


def resident_memory_of_family(process: int) -> int:
    """Bytes of a process and its descendants, what several of them share counted for each: a hundredth of the work.

    Good for comparing two trainings of the same processes, while they are timed.
    """
    return sum(_resident_memory(member) for member in family_of(process))


def family_of(process: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    family = [process]
    for member in family:
        family += children.get(member, [])
    return family


def proportional_memory(process: int) -> int:
    """Its own pages, and its share of those that others have too; nothing if it has ended.

    Without those of files, such as the libraries of torch: who else has them changes from one moment to the next.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _resident_memory(process: int) -> int:
    """Its pages but those of files; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _parent(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # it has ended meanwhile
        return 0
    # Its name stands in brackets, and may have blanks and brackets itself.
    return int(stat.rpartition(")")[2].split()[1])
