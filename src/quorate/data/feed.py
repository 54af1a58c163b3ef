"""The stream of batches that a worker reads, fetched ahead in loader processes or, with none, just in time.

Also what is fetched ahead: which blocks the next requests read, and which loader answers them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import torch

from quorate.core.errors import HelperLost, JobError
from quorate.core.failure import name_samples
from quorate.data.batch_nest import mapped
from quorate.data.block_set import BlockSet
from quorate.data.datasets import Columns, Room
from quorate.data.loader import Asked, Loader
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples, UpcomingBlocks, batch_of
from quorate.data.threads import CHECK_EVERY, HelperThreads, interruptible

MOST_REQUESTS = 256
MOST_SAMPLES = 1 << 17
_TURNS = 2
_GRACE = 0.05

Place = tuple[Source, int]
Pending = Future[Batch | FetchFailure]


class Feed:
    """Batches in the order of a reading plan, which so many `lanes` read.

    User code never runs in a thread: one that draws from a global generator would race with the lane that is computing.
    Blocks of shards are read ahead by threads, which run nothing but Quorate's own code. Whoever waits for data calls
    `check` now and then; what that raises ends the waiting. Unless it `is_planned`, there is no plan, and everything is
    read just in time. `room` is memory of the host that batches are sent to a device from.
    """

    def __init__(
        self,
        samples: Samples,
        requests: Iterator[Request],
        loader_workers: int,
        threads: int,
        prefetch: int = 2,
        *,
        lanes: int = 1,
        check: Callable[[], None] = lambda: None,
        is_planned: bool = True,
        room: Room | None = None,
    ) -> None:
        self._samples = samples
        self._room = room if is_planned else None
        # Where nobody knows what is read next, nothing is read ahead.
        loader_workers = loader_workers if is_planned else 0
        # Loaders are for the code of the task. Batches of columns need none of it, and are made faster here, or by a
        # thread, than they come from another process.
        self._loader_workers = 0 if samples.columns.keys() == samples.datasets.keys() else loader_workers
        # Of tensors in memory there is nothing to read ahead, nothing to wait for, and nothing that may go wrong. But
        # what is sent to a device is copied to memory that it reads fast, while the device computes.
        self._is_made_ahead = bool(samples.shards or (self._room and samples.columns)) and is_planned
        self._in_memory = {} if self._loader_workers or self._is_made_ahead else samples.columns
        self._prefetch = prefetch
        self._check = check
        self._lanes = lanes
        self._is_planned = is_planned
        self._begin(requests)
        # Loader processes compute with one thread, so fetching in this process does too: same bits either way.
        self._threads = threads if self._loader_workers == 0 and threads > 1 else None

    def _begin(self, requests: Iterator[Request]) -> None:
        samples = self._samples
        self._loaders: list[Loader] = []
        self._ahead: Iterator[Asked] | None = None
        self._planned: deque[tuple[Request, Pending | None]] = deque()
        if self._loader_workers:
            self._start_loaders(requests, self._lanes)
        elif self._is_made_ahead:
            samples.divide_memory(1)
            self._ahead = iter(BlockPrefetch(requests, samples.shards, behind=self._prefetch))
            # It makes batches of columns ahead: for these no code of the task runs, and nothing is drawn.
            self._batch_thread = HelperThreads("batch-maker", most=1)

    def begin_again(self, requests: Iterator[Request]) -> None:
        """Follow another plan from now on; what was read ahead by the old one is dropped."""
        self.close()
        self._begin(requests)

    def _start_loaders(self, requests: Iterator[Request], lanes: int) -> None:
        samples, count = self._samples, self._loader_workers
        if not samples.shards and not samples.is_stream:
            # Whoever reads sample by sample keeps nothing from one request to the next, whatever its lane.
            assignment = LoaderAssignment(requests, count, 1, 1, by_lane=False)
        else:
            # Batches of columns are made of whole blocks: a second loader of a lane would only open them a second time,
            # and read a second time what a stream gives.
            count = min(count, lanes) if Source.TRAINING in samples.columns or samples.is_stream else count
            assignment = LoaderAssignment(requests, count, lanes, self._prefetch)
            samples.divide_memory(count)
        self._assignment = assignment
        try:
            for loader in range(count):
                asked: Iterator[Asked] = ((request, None) for request in assignment.requests(loader))
                if samples.shards:
                    asked = iter(BlockPrefetch(assignment.requests(loader), samples.shards))
                self._loaders.append(Loader(samples, asked))
            for started in self._loaders:
                started.ask_ahead(self._prefetch)
        except BaseException:
            Loader.end(self._loaders)
            raise

    def next(self, expected: Request) -> Batch:
        """The batch that answers `expected`, which must be the next request of the plan."""
        if (columns := self._in_memory.get(expected.source)) is not None:
            return Batch(expected, columns.batch(expected.numbers))
        answer = self._take(expected) if self._loader_workers else self._read(expected)
        if answer.request != expected:
            raise AssertionError(f"The feed gave {answer.request} where the loop expected {expected}.")
        batch, noted = batch_of(answer), self._samples.noted
        if not batch.notes:
            return batch
        new = tuple(note for note in dict.fromkeys(batch.notes) if note not in noted)
        noted.update(new)
        return replace(batch, notes=new)

    def _read(self, request: Request) -> Batch | FetchFailure:
        if self._ahead is not None:
            request, pending = self._next_planned()
            if pending is not None:
                while not pending.done():
                    try:
                        pending.exception(CHECK_EVERY)
                    except TimeoutError:
                        self._check()
                        if not self._batch_thread.is_alive and not pending.done():
                            raise JobError("The thread that puts batches together is gone.") from None
                return pending.result()
        if self._threads is not None:
            torch.set_num_threads(1)
        try:
            with interruptible(self._check):
                return self._samples[request]
        finally:
            if self._threads is not None:
                torch.set_num_threads(self._threads)

    def _next_planned(self) -> tuple[Request, Pending | None]:
        """The next request, and its batch if that is made ahead; the plan itself is never run by a thread."""
        assert self._ahead is not None
        for request, blocks in islice(self._ahead, 1 + self._prefetch - len(self._planned)):
            if blocks is not None:
                self._samples.prefetch(blocks)
            columns = self._samples.columns.get(request.source)
            is_made_ahead = columns is not None if self._room else isinstance(columns, BlockSet)
            make = partial(self._made, request, columns)
            self._planned.append((request, self._batch_thread.submit(make) if is_made_ahead else None))
        return self._planned.popleft()

    def _made(self, request: Request, columns: Columns | BlockSet | None) -> Batch | FetchFailure:
        """By a thread: a batch of columns, in the memory that it is sent from if it is sent anywhere."""
        if self._room is None:
            return self._samples[request]
        if isinstance(columns, Columns):
            return Batch(request, columns.batch(request.numbers, self._room))
        answer, room = self._samples[request], self._room
        if isinstance(answer, FetchFailure):
            return answer
        return replace(answer, content=mapped(answer.content, lambda one: room(one.shape, one.dtype).copy_(one)))

    def _take(self, request: Request) -> Batch | FetchFailure:
        try:
            return self._loaders[self._assignment.next_loader()].take(request, self._check)
        except HelperLost as error:
            samples = f"{name_samples(request.indices)} of the {request.source.value} set"
            raise HelperLost(f"{error.message} It was to read {samples}.") from None

    def close(self) -> None:
        """End the loader processes, and read nothing ahead any more; what is still being read is not waited for."""
        Loader.end(self._loaders)
        self._loaders = []
        if self._ahead is not None:
            self._batch_thread.close(_GRACE)
            self._samples.prefetch({})


@dataclass(frozen=True, slots=True)
class _Seen:
    """A request, the blocks that it reads, and whether the one before it is of another lane."""

    request: Request
    places: tuple[Place, ...]
    begins_turn: bool


class BlockPrefetch:
    """The requests of a plan one after the other, and with each the blocks that it and the next ones read.

    It looks as far ahead as the blocks fit into the memory that is meant for them, and in any case at the next two
    turns of every lane, the requests that it makes in one go: what the lanes read at the same time must be there at
    the same time. `behind` requests that were given may not have been read yet: their blocks count still.
    """

    def __init__(self, plan: Iterator[Request], shards: Mapping[Source, BlockSet], behind: int = 0) -> None:
        self._plan = plan
        self._shards = shards
        self._most_behind = behind
        self._behind: deque[_Seen] = deque()
        self._ahead: deque[_Seen] = deque()
        self._users: Counter[Place] = Counter()
        # One set may be that of several sources: its memory is for all of them together.
        self._sets = {id(each): each for each in shards.values()}
        self._bytes = dict.fromkeys(self._sets, 0)
        self._samples = 0
        # How many turns of each lane begin ahead.
        self._turns: Counter[int] = Counter()
        self._last_lane: int | None = None
        self._has_changed = False

    def __iter__(self) -> Iterator[tuple[Request, UpcomingBlocks | None]]:
        """Each request with the blocks that are read from now on, its own first; None if they are as before."""
        while True:
            self._look()
            if not self._ahead:
                return
            blocks = self._blocks() if self._has_changed else None
            self._has_changed = False
            seen = self._ahead.popleft()
            self._behind.append(seen)
            self._turns[seen.request.lane] -= seen.begins_turn
            yield seen.request, blocks
            if len(self._behind) > self._most_behind:
                self._forget(self._behind.popleft())

    def _look(self) -> None:
        while self._wants_more():
            request = next(self._plan, None)
            if request is None:
                return
            source, lane, shards = request.source, request.lane, self._shards.get(request.source)
            blocks = () if shards is None else shards.blocks_of(request.numbers)
            seen = _Seen(request, tuple((source, block) for block in blocks), lane != self._last_lane)
            for place in seen.places:
                if not self._users[place]:
                    self._has_changed = True
                    self._count_bytes(place, 1)
                self._users[place] += 1
            self._samples += len(request.numbers)
            self._ahead.append(seen)
            self._last_lane = lane
            self._turns[lane] += seen.begins_turn

    def _forget(self, seen: _Seen) -> None:
        self._samples -= len(seen.request.numbers)
        for place in seen.places:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self._has_changed = True
                self._count_bytes(place, -1)

    def _wants_more(self) -> bool:
        count = len(self._ahead)
        if not self._sets:  # nothing to look for, and order() need not be called long before its epoch
            return not count
        # A lane that is alone has one turn without an end.
        if count <= _TURNS or (len(self._turns) > 1 and min(self._turns.values()) < _TURNS):
            return True
        has_room = all(self._bytes[each] < shards.limit for each, shards in self._sets.items())
        return has_room and count < MOST_REQUESTS and self._samples < MOST_SAMPLES

    def _count_bytes(self, place: Place, sign: int) -> None:
        shards = self._shards[place[0]]
        self._bytes[id(shards)] += sign * shards.block_bytes(place[1])

    def _blocks(self) -> UpcomingBlocks:
        found: dict[Source, dict[int, None]] = {source: {} for source in self._shards}
        for seen in chain(self._behind, self._ahead):
            for source, block in seen.places:
                found[source][block] = None
        return {source: list(blocks) for source, blocks in found.items()}


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
