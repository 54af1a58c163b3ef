"""A strategy of two roles: workers that train, and a server that hosts no lane and sums what they send it."""

import threading
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import GradientMemory
from quorate.collectives.reduction import sum_lanes
from quorate.core.errors import PeerLost
from quorate.core.generation import Member, Role
from quorate.core.spans import SpanRecorder
from quorate.observe.events import LinksMeasured
from quorate.replica.flat_gradients import FlatGradients
from quorate.replica.gradients import gradient_plan
from quorate.replica.replica import Replica
from quorate.replica.state_layout import Replicated
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.divergence import ReplicaDigests
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, StepRequest
from quorate.training.update import Update


class ToyServer:
    """In each round it takes something from every worker, and answers all of them alike."""

    def __init__(self, workers: int) -> None:
        self._asked: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(workers)]
        self._answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(workers)]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def ask(self, position: int, what: Any) -> Any:
        self._asked[position].put(what)
        answer = self._answers[position].get()
        if answer is None:
            raise PeerLost("the server", "a worker has left")
        return answer

    def leave(self, position: int) -> None:
        """Whoever waits for this worker waits in vain."""
        self._asked[position].put(None)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            given = [queue.get() for queue in self._asked]
            if any(one is None for one in given):
                break
            answer = tuple(given) if isinstance(given[0], bytes) else self._sum(given)
            for answers in self._answers:
                answers.put(answer)
        for answers in self._answers:
            answers.put(None)

    def _sum(self, given: list[list[torch.Tensor]]) -> torch.Tensor:
        lanes = [value for of_worker in given for value in of_worker]
        total = torch.empty_like(lanes[0])
        sum_lanes(lanes, total)
        return total


class ToyLinks:
    """A worker's way to the server, and through it to the other workers."""

    overlaps = False
    spans: SpanRecorder | None = None

    def __init__(self, server: ToyServer, position: int) -> None:
        self._server = server
        self._position = position

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        total.copy_(self._server.ask(self._position, list(lane_values)))

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        gathered: tuple[bytes, ...] = self._server.ask(self._position, payload)
        return gathered

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        everyones = self.gather(step, index, bytes(buffer) if self._position == root else b"")
        if self._position in receivers:
            buffer[:] = everyones[root]

    def round_trip(self) -> float | None:
        return None

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        return elements * itemsize

    def close(self) -> None:
        self._server.leave(self._position)


class ToyFactory:
    def __init__(self, spec: JobSpec, replica: Replica, server: ToyServer) -> None:
        self._spec = spec
        self._replica = replica
        self._server = server
        self.layout = Replicated(replica)

    def connect(self, endpoint: Endpoint) -> "ToyConnection":
        generation = endpoint.generation
        assert [member.role for member in generation.members].count(Role.SERVER) == 1
        own = generation.members[endpoint.position]
        links = ToyLinks(self._server, generation.workers.index(own))
        return ToyConnection(self._spec, self._replica, generation.workers, own, links)


class ToyConnection:
    def __init__(
        self, spec: JobSpec, replica: Replica, workers: tuple[Member, ...], own: Member, links: ToyLinks
    ) -> None:
        plan = gradient_plan(replica.trainable, spec.bucket_mb)
        self.links = links
        self.gradients = FlatGradients(replica.trainable, plan, GradientMemory.of_process(plan, own.lanes))
        parameters = [parameter for _, parameter in replica.trainable]
        held = parameters, replica.buffers, ReplicaDigests(replica), replica.optimizers.settings
        self._agreement = StepAgreement(links.gather, workers, own, *held, skips=False)
        self._own = own
        self._replica = replica

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        return progress, 0

    def placed(self) -> None:
        return None

    def measure(self) -> LinksMeasured:
        return LinksMeasured(worker=self._own.worker)

    def strategy(self, update: Update, activity: Activity) -> "ToyStrategy":
        return ToyStrategy(self._own, self.links, self.gradients, self._agreement, update)

    def close(self) -> None:
        self.links.close()
        self.gradients.close()


class ToyStrategy:
    def __init__(
        self, own: Member, links: ToyLinks, gradients: FlatGradients, agreement: StepAgreement, update: Update
    ) -> None:
        self.worker = own.worker
        self.hosted = own.lanes
        self.leads = 0 in own.lanes
        self._links = links
        self._gradients = gradients
        self._agreement = agreement
        self._update = update

    def begin(self, step: int) -> None:
        pass

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        for index, total in enumerate(self._gradients.total.buckets):
            lanes = [flat.buckets[index] for flat in self._gradients.lanes.values()]
            self._links.all_reduce(step, index, lanes, total)
        agreed = self._agreement.reach(step, results, request)
        return self._update.apply(step, agreed)

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        return self._links.gather(step, 2, payload)

    def close(self) -> None:
        self._links.close()
        self._gradients.close()
