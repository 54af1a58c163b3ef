"""Dealing the requests of a reading plan to several loaders of a dataset in shards."""

from collections import deque
from collections.abc import Iterator

from quorate.data.reading import Request


class Dealer:
    """Deals the requests of a plan to loaders; the order in which they are answered stays that of the plan.

    A lane belongs to one loader where there are lanes enough: its next requests read the same blocks as its last, and
    only one loader needs to keep them. Where there are more loaders than lanes, several take turns at a lane, each
    with as many requests as it works ahead: so all of them work at the same time, and each reads the lane's blocks.

    `lanes` is how many read at all. With more loaders than the lanes need, one without a request would look for its
    first to the end of the job.
    """

    def __init__(self, plan: Iterator[Request], loaders: int, lanes: int, ahead: int) -> None:
        self.loaders = loaders
        self._rest = plan
        self._lanes = lanes
        self._ahead = ahead
        self._numbers: dict[int, int] = {}
        self._requests: list[int] = []
        self._dealt: list[deque[Request]] = [deque() for _ in range(loaders)]
        self._answering: deque[int] = deque()

    def next_loader(self) -> int:
        """Who answers the next request of the plan, of those that loaders have been given."""
        return self._answering.popleft()

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
        loader = self._choose(request.lane)
        self._dealt[loader].append(request)
        self._answering.append(loader)

    def _choose(self, lane: int) -> int:
        number = self._numbers.setdefault(lane, len(self._numbers))
        if number == len(self._requests):
            self._requests.append(0)
        place = number % self._lanes
        if self._lanes >= self.loaders:
            return place % self.loaders
        share = len(range(place, self.loaders, self._lanes))
        turn = self._requests[number] // self._ahead
        self._requests[number] += 1
        return place + self._lanes * (turn % share)
