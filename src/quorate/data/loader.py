"""Loaders: processes that fetch what a plan asks for, ahead of whoever takes it."""

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import NoReturn

import torch

from quorate.core.errors import HelperLost, JobError, OutOfMemory
from quorate.core.failure import name_samples
from quorate.core.log_records import current_place
from quorate.core.machine import keep_freed_memory
from quorate.core.processes import close_in_children, describe_departure, die_with_parent, likely_cause, show_as
from quorate.core.user_code import describe, user_traceback
from quorate.data.batch_message import BatchMessage, MappedSegments, Segments, pack, receive, send, unpack
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples, UpcomingBlocks

_CHECK_EVERY = 0.1
"""Seconds between two looks at whether what is waited for is still wanted."""
_GRACE = 1.0
_KEPT = 256 * 2**20
"""Bytes of freed memory that a loader keeps at most: the samples of the next batch take it again."""
_UNSENDABLE = "With loader_workers above 0 a batch travels between processes, so it must be picklable."
_UNREADABLE = (
    "With loader_workers above 0 a batch travels between processes, and it could not be unpickled in the worker."
)


Asked = tuple[Request, UpcomingBlocks | None]
"""A request, and the blocks that are read from now on, unless they are as before."""


class Loaders:
    """So many loader processes, which answer the requests of a plan that so many `lanes` make."""

    def __init__(self, samples: Samples, requests: Iterator[Request], count: int, lanes: int, prefetch: int) -> None:
        if not samples.shards and not samples.is_stream:
            # Whoever reads sample by sample keeps nothing from one request to the next, whatever its lane.
            assignment = LoaderAssignment(requests, count, 1, 1, by_lane=False)
        else:
            # Batches of columns are made of whole blocks: a second loader of a lane would only open them a second time,
            # and read a second time what a stream gives.
            count = min(count, lanes) if Source.TRAINING in samples.columns or samples.is_stream else count
            assignment = LoaderAssignment(requests, count, lanes, prefetch)
            samples.divide_memory(count)
        self._assignment = assignment
        self.processes: list[Loader] = []
        try:
            for number in range(count):
                self.processes.append(Loader(samples, _asked(samples, assignment.requests(number))))
            for started in self.processes:
                started.ask_ahead(prefetch)
        except BaseException:
            self.close()
            raise

    def take(self, request: Request, check: Callable[[], None]) -> Batch | FetchFailure:
        try:
            return self.processes[self._assignment.next_loader()].take(request, check)
        except HelperLost as error:
            samples = f"{name_samples(request.indices)} of the {request.source.value} set"
            raise HelperLost(f"{error.message} It was to read {samples}.") from None

    def close(self) -> None:
        Loader.end(self.processes)


def _asked(samples: Samples, requests: Iterator[Request]) -> Iterator[Asked]:
    if not samples.shards:
        return ((request, None) for request in requests)
    from quorate.data.prefetch import BlockPrefetch

    return iter(BlockPrefetch(requests, samples.shards))


class Loader:
    """A process that answers what a plan asks, in its order.

    It is asked (`ask_ahead`) once all loaders are there: making the plan runs code of the task, which may change what
    later forks would have.

    HelperLost tells that it is gone, when its own answer is waited for: so what is heard is the death of the one that
    was to read what is asked for now, and not of another that died of something further on.
    """

    def __init__(self, samples: Samples, plan: Iterator[Asked]) -> None:
        self._plan = plan
        self._unsent = bytearray()
        self._segments = MappedSegments()
        try:
            self._start(samples)
        except OSError as error:
            raise HelperLost(f"its loader process could not be started: {error.strerror}.") from error

    def ask_ahead(self, prefetch: int) -> None:
        for _ in range(prefetch):
            self._ask()

    def _start(self, samples: Samples) -> None:
        self._socket, theirs = socket.socketpair()
        close_in_children(self._socket)
        sys.stdout.flush()
        sys.stderr.flush()
        worker = os.getpid()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._socket.close)
            self.pid = os.fork()
            if self.pid == 0:
                _serve(samples, theirs, worker)
            on_failure.callback(os.waitpid, self.pid, 0)
            on_failure.callback(os.kill, self.pid, signal.SIGKILL)
            # Its death is seen by this, and not by the end of the socket, which a process that it has forked may hold.
            self._pidfd = os.pidfd_open(self.pid)
            on_failure.pop_all()
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def take(self, request: Request, check: Callable[[], None]) -> Batch | FetchFailure:
        """The next answer, which is to this request; while it is waited for, `check` is called now and then."""
        try:
            message = receive(self._socket, lambda: self._wait(check), self._segments)
        except (EOFError, ConnectionError):
            raise HelperLost(f"its loader process {self.pid} {self._departure()}") from None
        except OSError as error:
            raise JobError(f"A batch could not be taken from a loader process: {error.strerror}.") from error
        try:
            answer = unpack(message)
        except MemoryError:
            raise
        except Exception as error:  # of a class of the task, in __setstate__ or the like: no fault of the transport
            answer = FetchFailure(request, None, describe(error), user_traceback(error), _UNREADABLE)
        if isinstance(answer, JobError):
            raise answer
        self._ask()
        return answer  # type: ignore[no-any-return]

    def _ask(self) -> None:
        """Have the next of the plan fetched. It never waits: a process that has not read what it was asked before may
        be waiting until its answers are read."""
        asked = next(self._plan, None)
        if asked is not None:
            self._unsent += pickle.dumps((*asked, self._segments.take_released()), protocol=5)
            self._send()

    def _wait(self, check: Callable[[], None]) -> None:
        """Until there is something to read."""
        self._send()
        outgoing = select.POLLOUT if self._unsent else 0
        self._poll.register(self._socket, select.POLLIN | outgoing)
        ready = dict(self._poll.poll(_CHECK_EVERY * 1000))
        if not ready:
            check()
        elif self._socket.fileno() not in ready:
            raise EOFError  # it is dead, and what it had sent has been read

    def _send(self) -> None:
        # One that is gone is told of when its answer is waited for.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    @staticmethod
    def end(loaders: Sequence["Loader"]) -> None:
        """End all of them, whatever they are doing: they have nothing to lose."""
        for loader in loaders:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(loader._pidfd, signal.SIGKILL)
        over = monotonic() + _GRACE
        for loader in loaders:
            loader._socket.close()
            if loader._dies_until(over):
                loader._reap()
            os.close(loader._pidfd)

    def _departure(self) -> str:
        if not self._dies_until(monotonic() + _GRACE):
            return "has closed its end of the socket."
        code = self._reap()
        return f"{'is gone' if code is None else describe_departure(code)}.{likely_cause(code)}"

    def _dies_until(self, over: float) -> bool:
        dying = select.poll()
        dying.register(self._pidfd, select.POLLIN)
        return bool(dying.poll(max(0.0, over - monotonic()) * 1000))

    def _reap(self) -> int | None:
        """Its exit code, negative for a signal."""
        try:
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:  # code of the task has waited for children, and got this one
            return None
        assert ended is not None, "it waits until there is one"
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class LoaderAssignment:
    """Assigns the requests of a plan to loaders; the order in which they are answered stays that of the plan.

    A lane belongs to one loader where there are lanes enough: its next requests read the same blocks as its last, and
    only one loader needs to keep them. Where there are more loaders than lanes, several take turns at a lane, each
    with as many requests as it works ahead: so all of them work at the same time, and each reads the lane's blocks.

    `lanes` is how many read at all. With more loaders than the lanes need, one without a request would look for its
    first to the end of the job. Without `by_lane` all requests count as those of one lane.
    """

    def __init__(self, plan: Iterator[Request], loaders: int, lanes: int, ahead: int, *, by_lane: bool = True) -> None:
        self.loaders = loaders
        self._rest = plan
        self._lanes = lanes
        self._ahead = ahead
        self._by_lane = by_lane
        # The lanes by number, as they come first, and how many requests each has made.
        self._numbers: dict[int, int] = {}
        self._requests: Counter[int] = Counter()
        self._assigned: list[deque[Request]] = [deque() for _ in range(loaders)]
        self._answering: deque[int] = deque()

    def next_loader(self) -> int:
        """Who answers the next request of the plan, of those that loaders have been given."""
        return self._answering.popleft()

    def requests(self, loader: int) -> Iterator[Request]:
        """What one loader answers, in order."""
        while True:
            while not self._assigned[loader]:
                request = next(self._rest, None)
                if request is None:
                    return
                assigned = self._choose(request.lane if self._by_lane else 0)
                self._assigned[assigned].append(request)
                self._answering.append(assigned)
            yield self._assigned[loader].popleft()

    def _choose(self, lane: int) -> int:
        number = self._numbers.setdefault(lane, len(self._numbers))
        place = number % self._lanes
        if self._lanes >= self.loaders:
            return place % self.loaders
        share = len(range(place, self.loaders, self._lanes))
        turn = self._requests[number] // self._ahead
        self._requests[number] += 1
        return place + self._lanes * (turn % share)


def _serve(samples: Samples, sock: socket.socket, worker: int) -> NoReturn:
    """What a loader process does with its life."""
    code = 1
    try:
        # What the worker has left to be collected may wait, when it is, for threads that a loader does not have.
        gc.freeze()
        if (place := current_place()) is not None:
            place.process, place.lane = f"{place.process} loader", lambda: None
            show_as(place.process, place.run)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(worker)
        # One: those of the worker are not in this process, and waiting for them would take for ever.
        torch.set_num_threads(1)
        keep_freed_memory(_KEPT)
        segments = Segments()
        with sock.makefile("rb") as plan:
            while True:
                request, blocks, released = pickle.load(plan)
                segments.release(released)
                send(sock, _answer(samples, request, blocks), segments)
    except (ConnectionError, EOFError):
        code = 0  # nobody asks any more, nor takes the answer
    except BaseException:
        traceback.print_exc()  # nobody above is left to do it: this frame ends the process
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _answer(samples: Samples, request: Request, blocks: UpcomingBlocks | None) -> BatchMessage:
    try:
        if blocks is not None:
            samples.prefetch(blocks)
        answer = samples[request]
        try:
            return pack(answer)
        except MemoryError:  # of the machine, not of the batch
            raise
        except Exception as error:
            return pack(FetchFailure(request, None, describe(error), user_traceback(error), _UNSENDABLE))
    except MemoryError as error:
        return pack(OutOfMemory(f"its loader process {os.getpid()} ran out of memory: {describe(error)}."))
    except Exception as error:
        # Code of the task that raises is an answer like any other: this is not its doing.
        traceback.print_exc()
        return pack(JobError(f"A loader process failed: {describe(error)}"))
