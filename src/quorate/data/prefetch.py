"""What a worker reads ahead without loader processes: blocks of shards, and batches that need no code of the task."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

from quorate.core.errors import JobError
from quorate.data.collate import mapped
from quorate.data.datasets import BlockSet, Columns, Room
from quorate.data.sampler import Request, Source
from quorate.data.samples import Batch, FetchFailure, Samples, UpcomingBlocks
from quorate.data.threads import CHECK_EVERY, HelperThreads

MOST_REQUESTS = 256
MOST_SAMPLES = 1 << 17
_TURNS = 2
_GRACE = 0.05

Place = tuple[Source, int]
Pending = Future[Batch | FetchFailure]


class BatchesAhead:
    """Batches in the order of a plan: a thread makes those of columns, for which no code of the task runs and nothing
    is drawn; others are read by `read` when they are taken. The plan itself is never run by a thread."""

    def __init__(
        self,
        samples: Samples,
        requests: Iterator[Request],
        prefetch: int,
        room: Room | None,
        read: Callable[[Request], Batch | FetchFailure],
    ) -> None:
        samples.divide_memory(1)
        self._samples, self._prefetch, self._room, self._read = samples, prefetch, room, read
        self._ahead = iter(BlockPrefetch(requests, samples.shards, behind=prefetch))
        self._planned: deque[tuple[Request, Pending | None]] = deque()
        self._thread = HelperThreads("batch-maker", most=1)

    def take(self, request: Request, check: Callable[[], None]) -> Batch | FetchFailure:
        request, pending = self._next_planned()
        if pending is None:
            return self._read(request)
        while not pending.done():
            try:
                pending.exception(CHECK_EVERY)
            except TimeoutError:
                check()
                if not self._thread.is_alive and not pending.done():
                    raise JobError("The thread that puts batches together is gone.") from None
        return pending.result()

    def close(self) -> None:
        self._thread.close(_GRACE)
        self._samples.prefetch({})

    def _next_planned(self) -> tuple[Request, Pending | None]:
        for request, blocks in islice(self._ahead, 1 + self._prefetch - len(self._planned)):
            if blocks is not None:
                self._samples.prefetch(blocks)
            columns = self._samples.columns.get(request.source)
            is_made_ahead = columns is not None and (self._room is not None or not isinstance(columns, Columns))
            make = partial(self._made, request, columns)
            self._planned.append((request, self._thread.submit(make) if is_made_ahead else None))
        return self._planned.popleft()

    def _made(self, request: Request, columns: Columns | BlockSet | None) -> Batch | FetchFailure:
        """By the thread: in the memory that a batch is sent from, if it is sent anywhere."""
        if (room := self._room) is None:
            return self._samples[request]
        if isinstance(columns, Columns):
            return Batch(request, columns.batch(request.numbers, room))
        answer = self._samples[request]
        if isinstance(answer, FetchFailure):
            return answer
        return replace(answer, content=mapped(answer.content, lambda one: room(one.shape, one.dtype).copy_(one)))


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
