"""For how long a worker may act without another word from its coordinator."""

from collections.abc import Callable

from quorate.core.timing import Timing

Clock = Callable[[], float]


class Lease:
    """A permission that ends by itself. It counts from the *sending* of the call that renewed it."""

    def __init__(self, timing: Timing, clock: Clock) -> None:
        self._timing = timing
        self._clock = clock
        self._answered = clock()
        self._until = self._answered
        self._ended = False

    def renew(self, sent: float, seconds: float) -> None:
        """A call that was sent at `sent` has been answered with a lease."""
        if seconds > 0:
            self._answered = max(self._answered, sent)
            self._until = max(self._until, sent + seconds)

    def end(self) -> None:
        """The job is over: nothing may be done in its name any more, whatever answer is still on its way."""
        self._ended = True

    def remaining(self) -> float:
        """Seconds that are left; not positive when it is over."""
        return 0.0 if self._ended else self._until - self._clock()

    def explain(self, address: str) -> str:
        """Why it is over."""
        return (
            f"the coordinator at {address} has not answered for {self._clock() - self._answered:.1f} s, longer than the"
            f" lease of {self._timing.lease:.1f} s (failure_timeout: {self._timing.failure_timeout}); this worker"
            " stops, since its lanes may be somebody else's by now"
        )
