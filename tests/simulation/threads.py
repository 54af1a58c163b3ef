"""Threads of simulated processes: each is a greenlet that runs until it waits, and is woken by the virtual clock.

So the code of a real worker runs here as it is, with its main thread, its heartbeats and what it follows side by side,
and a seed replays exactly: nobody is interrupted anywhere but where it waits.
"""

from collections.abc import Callable
from types import TracebackType

from greenlet import GreenletExit, getcurrent, greenlet

from simulation.clock import Process

_INSTANT = 1e-9
"""The least that a wait takes: whoever waits again and again for less than a clock can tell would stop the time."""


class _Waiter:
    """A thread that waits, until it is woken for the first time."""

    def __init__(self) -> None:
        self._thread: greenlet | None = getcurrent()

    def wake(self) -> None:
        """Let it run until it waits again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.switch()


class SimulatedThread:
    """What `spawn` gives: its work, and who waits for its end."""

    def __init__(self, work: Callable[[], None], ended: "SimulatedCondition") -> None:
        self._work = work
        self._ended = ended
        self._has_ended = False

    def run(self) -> None:
        """Do the work."""
        try:
            self._work()
        finally:
            self._has_ended = True
            self._ended.notify_all()

    def join(self) -> None:
        """Wait until it has ended."""
        self._ended.wait_for(lambda: self._has_ended)


class SimulatedRuntime:
    """The `Runtime` of one simulated process: it reads the clock of its host, and rests while that is stopped."""

    def __init__(self, process: Process) -> None:
        self._process = process
        # Whoever advances the clock, and not the thread that has started the process.
        self._scheduler = getcurrent()
        while self._scheduler.parent is not None:
            self._scheduler = self._scheduler.parent
        self._threads: list[greenlet] = []

    def now(self) -> float:
        """The time, as this host has it."""
        return self._process.clock.now

    def condition(self) -> "SimulatedCondition":
        """A new one."""
        return SimulatedCondition(self)

    def spawn(self, name: str, work: Callable[[], None]) -> SimulatedThread:
        """Have something run beside the caller, from the next moment on."""
        thread = SimulatedThread(work, self.condition())
        running = greenlet(thread.run, self._scheduler)
        self._threads.append(running)
        self._process.after(0.0, running.switch)
        return thread

    def sleep(self, seconds: float) -> None:
        """Be busy for so long."""
        self.wake_after(_Waiter(), seconds)
        self.rest()

    def wake_after(self, waiter: _Waiter, seconds: float) -> None:
        """Wake one that waits, if its process lives then and is not stopped."""
        self._process.after(seconds, waiter.wake)

    def rest(self) -> None:
        """Let the others run, until whoever calls is woken; a dead process is not, whatever it still wants to do."""
        if not self._process.is_alive:
            raise GreenletExit
        self._scheduler.switch()

    def end(self) -> None:
        """End all threads but the one that calls, where they wait: the process is dead."""
        caller = getcurrent()
        for thread in self._threads:
            if thread is not caller and not thread.dead:
                thread.parent = caller
                thread.throw(GreenletExit)


class SimulatedCondition:
    """Threads take turns only where they wait, so holding it takes nothing."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime = runtime
        self._waiting: list[_Waiter] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it holds, or for so many seconds; whether it does."""
        over = None if timeout is None else self._runtime.now() + (max(timeout, _INSTANT) if timeout > 0 else 0.0)
        while not predicate():
            remaining = None if over is None else over - self._runtime.now()
            if remaining is not None and remaining <= 0:
                return False
            waiter = _Waiter()
            self._waiting.append(waiter)
            if remaining is not None:
                self._runtime.wake_after(waiter, max(remaining, _INSTANT))
            self._runtime.rest()
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        return True

    def notify_all(self) -> None:
        """Have those who wait look again, when the caller waits itself."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            self._runtime.wake_after(waiter, 0.0)
