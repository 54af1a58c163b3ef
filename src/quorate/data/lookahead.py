"""Looking ahead in a reading plan: which blocks of a dataset in shards the next requests read."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from quorate.data.reading import Request, Source
from quorate.data.shards.dataset import Shards

MOST_REQUESTS = 256
MOST_SAMPLES = 1 << 17
_ROUNDS = 2

Place = tuple[Source, int]
Expected = dict[Source, list[int]]


class Lookahead:
    """The requests of a plan one after the other, and with each the blocks that it and the next ones read.

    It looks as far ahead as the blocks fit into the memory that is meant for them, and in any case at the next
    requests of every lane: what the lanes read at the same time must be there at the same time. `behind` requests that
    were given may not have been read yet: their blocks count still.
    """

    def __init__(self, plan: Iterator[Request], shards: Mapping[Source, Shards], behind: int = 0) -> None:
        self._plan = plan
        self._shards = shards
        self._most_behind = behind
        self._behind: deque[tuple[Request, tuple[Place, ...]]] = deque()
        self._ahead: deque[tuple[Request, tuple[Place, ...]]] = deque()
        self._users: Counter[Place] = Counter()
        self._bytes = dict.fromkeys(shards, 0)
        self._samples = 0
        self._lanes: set[int] = set()
        self._has_changed = False

    def __iter__(self) -> Iterator[tuple[Request, Expected | None]]:
        """Each request with the blocks that are read from now on, its own first; None if they are as before."""
        while True:
            self._look()
            if not self._ahead:
                return
            blocks = self._blocks() if self._has_changed else None
            self._has_changed = False
            self._behind.append(self._ahead.popleft())
            yield self._behind[-1][0], blocks
            if len(self._behind) > self._most_behind:
                self._forget(*self._behind.popleft())

    def _look(self) -> None:
        while self._wants_more():
            request = next(self._plan, None)
            if request is None:
                return
            places = self._places(request)
            for place in places:
                if not self._users[place]:
                    self._has_changed = True
                    self._bytes[place[0]] += self._size(place)
                self._users[place] += 1
            self._lanes.add(request.lane)
            self._samples += len(request.indices)
            self._ahead.append((request, places))

    def _forget(self, request: Request, places: tuple[Place, ...]) -> None:
        self._samples -= len(request.indices)
        for place in places:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self._has_changed = True
                self._bytes[place[0]] -= self._size(place)

    def _wants_more(self) -> bool:
        count = len(self._ahead)
        if count < _ROUNDS * len(self._lanes) + 1:
            return True
        has_room = all(used < self._shards[source].limit for source, used in self._bytes.items())
        return has_room and count < MOST_REQUESTS and self._samples < MOST_SAMPLES

    def _places(self, request: Request) -> tuple[Place, ...]:
        shards = self._shards.get(request.source)
        if shards is None:
            return ()
        return tuple((request.source, block) for block in shards.blocks_of(request.indices))

    def _size(self, place: Place) -> int:
        return self._shards[place[0]].block_bytes(place[1])

    def _blocks(self) -> Expected:
        found: dict[Source, dict[int, None]] = {source: {} for source in self._shards}
        for _, places in chain(self._behind, self._ahead):
            for source, block in places:
                found[source][block] = None
        return {source: list(blocks) for source, blocks in found.items()}


class Dealer:
    """Deals the requests of a plan to loaders, so that all requests of a lane go to the same one.

    The next requests of a lane read the same blocks as the last: only one loader needs to keep them.
    """

    def __init__(self, plan: Iterator[Request], loaders: int) -> None:
        begin = list(islice(plan, MOST_REQUESTS))
        lanes = {request.lane for request in begin}
        # No loader without a lane: it would look for its first request to the end of the job.
        self.loaders = max(1, min(loaders, len(lanes)))
        self._rest = plan
        self._dealt: list[deque[Request]] = [deque() for _ in range(self.loaders)]
        self._loader_of: dict[int, int] = {}
        for request in begin:
            self._deal(request)

    def loader_of(self, request: Request) -> int:
        """Who answers a request."""
        return self._loader_of.setdefault(request.lane, len(self._loader_of) % self.loaders)

    def requests(self, loader: int) -> Iterator[Request]:
        """What one loader answers, in order."""
        while True:
            while not self._dealt[loader]:
                request = next(self._rest, None)
                if request is None:
                    return
                self._deal(request)
            yield self._dealt[loader].popleft()

    def _deal(self, request: Request) -> None:
        self._dealt[self.loader_of(request)].append(request)
