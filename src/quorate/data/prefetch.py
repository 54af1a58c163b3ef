"""What is fetched ahead: which blocks the next requests read, and which loader answers them."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from quorate.data.sampler import Request, Source
from quorate.data.samples import UpcomingBlocks
from quorate.data.shards.dataset import Shards

MOST_REQUESTS = 256
MOST_SAMPLES = 1 << 17
_TURNS = 2

Place = tuple[Source, int]


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

    def __init__(self, plan: Iterator[Request], shards: Mapping[Source, Shards], behind: int = 0) -> None:
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
        # How many turns of each lane begin ahead, and how many lanes have fewer than are looked at.
        self._turns: Counter[int] = Counter()
        self._short = 0
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
            if seen.begins_turn:
                self._turns[seen.request.lane] -= 1
                self._short += self._turns[seen.request.lane] == _TURNS - 1
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
            if seen.begins_turn:
                self._short += lane not in self._turns
                self._turns[lane] += 1
                self._short -= self._turns[lane] == _TURNS

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
        # A lane that is alone has one turn without an end.
        if count <= _TURNS or (self._short and len(self._turns) > 1):
            return True
        has_room = all(self._bytes[each] < shards.limit for each, shards in self._sets.items())
        return has_room and count < MOST_REQUESTS and self._samples < MOST_SAMPLES

    def _count_bytes(self, place: Place, sign: int) -> None:
        shards = self._shards[place[0]]
        self._bytes[id(shards)] += sign * shards.index.block_bytes(place[1])

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
