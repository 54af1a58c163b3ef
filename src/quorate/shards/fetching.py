"""Getting bytes that may be slow to come: trouble that passes is tried again, and a slow store is asked twice."""

import errno
import itertools
import logging
import queue
import random
import statistics
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic

from quorate.core.user_code import describe
from quorate.data.bad_sample import Unreachable
from quorate.data.threads import CHECK_EVERY, Closed, HelperThreads, check_interrupted
from quorate.storage.objects import SLOWEST, ObjectMissing, StoreError

log = logging.getLogger(__name__)

TRIES = 6
"""So often is a file tried, ..."""
GIVE_UP = 120.0
"""... and a remote store for so many seconds: longer than a restart of it or of a network takes."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
PATIENCE = 60.0
"""Seconds after which a remote store that has not answered is asked again; and more for many bytes."""

# What another try may find mended: a network file system, a cable. Not a missing file or a full table of descriptors.
_PASSING = {
    errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO, errno.ECOMM, errno.EPIPE,
}  # fmt: skip

# A second request goes out when the first takes so many times the usual: it finds another connection, often another
# server. One in ten at most, or a store that is overloaded would get twice the load.
_SLOW, _SOONEST = 3.0, 0.05
_USUAL, _KNOWN = 64, 8
_SHARE, _FREE = 0.1, 2
_DOUBLINGS = 16
_QUIET = 5.0


class StoreAway(Unreachable):
    """A store that has answered nobody for as long as it is waited for: whatever else it has cannot be read either."""


class Fetcher:
    """Calls a function that reads, until it gives an answer or there is no hope. Safe for several threads.

    `close` ends the waiting of all of them.
    """

    def __init__(self, is_remote: bool) -> None:
        self.hedges = 0
        self._is_remote = is_remote
        self._over = threading.Event()
        self._seconds: deque[float] = deque(maxlen=_USUAL)
        self._requests = 0
        self._answered = monotonic()
        self._is_told = False
        # Each asks the store for as long as it takes, also when patience is over.
        self._callers = HelperThreads("shard-request")
        # Of its own: the lanes draw from the global generators.
        self._random = random.Random()

    def fetch(self, name: str, read: Callable[[], bytes], length: int | None = None) -> bytes:
        """What `read` gives, of about so many bytes; `name` is what is read, for the message if it cannot be."""
        began = monotonic()
        patience = PATIENCE + (length or 0) / SLOWEST
        for attempt in itertools.count():
            try:
                return self._ask(read, patience) if self._is_remote else read()
            except Closed:
                break
            except Unreachable:
                raise  # says all there is to say
            except Exception as error:
                seconds = monotonic() - began
                is_last = seconds > GIVE_UP if self._is_remote else attempt + 1 == TRIES
                if is_last or not is_passing(error):
                    is_away = self._is_remote and is_passing(error) and self._answered < began
                    why = _explained(name, error, attempt + 1, seconds)
                    raise (StoreAway if is_away else Unreachable)(why) from None
                # Once, until the store answers again.
                if self._is_remote and seconds > _QUIET and not self._is_told:
                    self._is_told = True
                    log.warning("%s It is tried for %.0f s in all", _explained(name, error, 1, seconds), GIVE_UP)
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, _DOUBLINGS))
            if self._ends_within(pause * self._random.uniform(0.5, 1)):
                break
        raise Unreachable(f"{name} was not read: reading has ended.")

    def close(self) -> None:
        """Begin no further try, and wait for no answer any more."""
        self._over.set()
        self._callers.close()

    def _ends_within(self, pause: float) -> bool:
        until = monotonic() + pause
        while (left := until - monotonic()) > 0:
            if self._over.wait(min(CHECK_EVERY, left)):
                return True
            check_interrupted()
        return self._over.is_set()

    def _ask(self, read: Callable[[], bytes], patience: float) -> bytes:
        """The first answer of one request or, if it is slow, of two."""
        answers: queue.SimpleQueue[Future[bytes]] = queue.SimpleQueue()
        began = monotonic()
        self._requests += 1
        self._callers.submit(read).add_done_callback(answers.put)
        waiting, limit = 1, patience
        if len(self._seconds) >= _KNOWN:
            limit = min(patience, max(_SOONEST, _SLOW * statistics.median(self._seconds)))
        while True:
            try:
                answer = answers.get(timeout=min(CHECK_EVERY, max(0.0, began + limit - monotonic())))
            except queue.Empty:
                if self._over.is_set():
                    raise Closed from None
                check_interrupted()
                if monotonic() < began + limit:
                    continue
                if limit >= patience:
                    raise TimeoutError(f"no answer within {patience:.0f} s") from None
                limit = patience
                if self.hedges < _FREE + _SHARE * self._requests:
                    self.hedges += 1
                    self._callers.submit(read).add_done_callback(answers.put)
                    waiting += 1
                continue
            waiting -= 1
            if answer.exception() is None:
                self._answered, self._is_told = monotonic(), False
                self._seconds.append(self._answered - began)
            if answer.exception() is None or not waiting:
                return answer.result()


def is_passing(error: BaseException) -> bool:
    """Whether it is worth another try."""
    if isinstance(error, StoreError):
        return not error.lasts and not isinstance(error, ObjectMissing)
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING


def _explained(name: str, error: Exception, tries: int, seconds: float) -> str:
    if isinstance(error, FileNotFoundError | ObjectMissing):
        why = (
            "it is not there. Restore it, or list what there is now with `quorate data index PATH --force` "
            "and train again."
        )
    elif isinstance(error, StoreError):
        why = error.message
    else:
        why = f"{describe(error)}."
    often = f" (tried {tries} times in {seconds:.1f} s)" if tries > 1 else ""
    return f"{name} cannot be read{often}: {why}"
