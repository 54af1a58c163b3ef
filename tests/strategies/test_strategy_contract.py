"""What every strategy owes to the loop: the same state and the same knowledge on all workers, or no change at all."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import gang
from bits.bit_tasks import Momentum, Points
from collectives.rings import meeting
from quorate.collectives.endpoint import Endpoint
from quorate.core.errors import LeaseExpired, LinkError, LossError
from quorate.core.generation import Role
from quorate.data.ledger import Tally
from quorate.data.sampler import LaneSampler
from quorate.lanes.chunks import host_lanes
from quorate.replica.gradients import Gradients
from quorate.replica.losses import LossSum
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.strategies.kinds import Connection, Holdings, strategy_factory
from quorate.task.progress import Progress
from quorate.task.task import configure
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, Save, StepRequest, Strategy
from quorate.training.update import Update

LANES = 3
SAMPLES = 4
"""Of each lane."""
T = TypeVar("T")


class Normed(Momentum):
    """With buffers that differ between lanes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@dataclass(frozen=True)
class Kind:
    name: str
    workers: int
    links: str = "shm"

    @property
    def servers(self) -> int:
        return 2 if self.name == "parameter-server" else 0

    @property
    def strategy(self) -> dict[str, Any]:
        return {"kind": self.name} | ({"servers": 2, "replicas": 2} if self.servers else {})


RING = Kind("ring", 1)
KINDS = [RING, Kind("ring", 3), Kind("ring", 2, "tcp"), *(Kind("parameter-server", n) for n in (1, 3))]
KINDS.append(Kind("parameter-server", 2, "tcp"))
GANGS = [Kind("ddp", 1), Kind("ddp", 2), Kind("ddp", 3)]
"""With bits that depend on the number of workers."""
NAMES = "{0.name}-{0.workers}-{0.links}".format


class Worker:
    """A worker's replica, and its strategy once it is connected."""

    """Or a server, which hosts no lane and does the same."""

    strategy: Strategy
    gradients: Gradients

    def __init__(self, kind: Kind, role: Role) -> None:
        keys: dict[str, Any] = {"lanes": LANES, "batch_size": LANES * SAMPLES, "clip_norm": 10.0}
        self.spec = gang.job(Normed, strategy=kind.strategy, **keys)
        self.task = configure(Normed, {}, "test", self.spec.seed)
        self.replica = Replica(self.task, self.spec)
        self.factory = strategy_factory(self.spec, self.replica, Holdings(role=role))
        self.check_lease: Callable[[], None] = gang.no_trouble
        self.loss_factor = 1.0

    def begin(self, connection: Connection) -> None:
        activity = Activity(lambda *_: None)
        activity.begin_step(1)
        watch = StateWatch(self.task, self.replica)
        self.gradients = connection.gradients
        sampler = LaneSampler(self.spec, len(Points()), self.task.order)
        update = Update(
            self.spec,
            self.replica,
            self.gradients,
            watch,
            sampler,
            activity,
            settle=gang.no_trouble,
            check_lease=lambda: self.check_lease(),
        )
        self.strategy = connection.strategy(update, activity)

    def step(self, step: int, request: StepRequest | None = None) -> Agreement:
        self.strategy.begin(step)
        results = [self._lane(step, lane) for lane in self.strategy.hosted]
        return self.strategy.advance(step, results, request or StepRequest())

    def _lane(self, step: int, lane: int) -> LaneResult:
        samples = [SAMPLES * LANES * (step - 1) + SAMPLES * lane + i for i in range(SAMPLES)]
        points = Points()
        batch = [torch.stack(part) for part in zip(*(points[i] for i in samples), strict=True)]
        self.replica.begin_lane()
        self.gradients.begin(lane)
        loss = self.task.loss(self.replica.model, batch)
        self.gradients.backward(loss, 1 / LANES, is_last=True)
        return LaneResult(
            lane,
            SAMPLES,
            self.gradients.finish(),
            {"": LossSum(loss.item() * SAMPLES * self.loss_factor, SAMPLES)},
            {"lane": (float(lane) * SAMPLES, SAMPLES)},
            self.replica.buffers.take_changes(),
            Tally.of(0, samples),
        )


def endpoints(kind: Kind, stack: ExitStack, hosting: Sequence[range] | None = None) -> list[Endpoint]:
    hosting = hosting or host_lanes(LANES, kind.workers)
    return stack.enter_context(meeting(hosting, servers=kind.servers, shares_memory=kind.links == "shm"))


@contextmanager
def connected(kind: Kind) -> Iterator[list[Worker]]:
    workers = [Worker(kind, Role.WORKER) for _ in range(kind.workers)]
    workers += [Worker(kind, Role.SERVER) for _ in range(kind.servers)]

    def connect(worker: Worker, endpoint: Endpoint) -> Connection:
        connection = worker.factory.connect(endpoint)
        connection.align(Progress(), Activity(lambda *_: None), lambda _: None)
        return connection

    with ExitStack() as stack:
        with ThreadPoolExecutor(len(workers)) as threads:
            connections = list(threads.map(connect, workers, endpoints(kind, stack)))
        for worker, connection in zip(workers, connections, strict=True):
            stack.callback(connection.close)
            worker.begin(connection)
            stack.callback(worker.strategy.close)
            stack.callback(worker.__dict__.clear)  # an update knows its worker: in a circle its memory would stay
        del connections, connection, worker
        yield workers


def that_train(workers: list[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.strategy.hosted]


def everywhere(workers: list[Worker], work: Callable[[Worker], T]) -> list[T]:
    with ThreadPoolExecutor(len(workers)) as threads:
        return list(threads.map(work, workers))


def error_of(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def known(outcome: Agreement) -> Any:
    """What all must know alike."""
    agreed = outcome
    losses = {name: (loss.total, loss.count) for name, loss in agreed.losses.items()}
    return agreed.samples, str(agreed.tally), losses, agreed.log, agreed.request, outcome.norms


@pytest.fixture(params=[*KINDS, *GANGS], ids=NAMES)
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with connected(request.param) as workers:
        yield workers


def after_three_steps(kind: Kind) -> tuple[str, Any]:
    """The weights, and what is known of the last step."""
    with connected(kind) as workers:
        for step in (1, 2, 3):
            everyone = everywhere(workers, lambda worker, step=step: worker.step(step))  # type: ignore[misc]
        trained = that_train(workers)
        outcomes = [known(outcome) for outcome in everyone[: len(trained)]]
        digests = {worker.replica.weights_digest() for worker in trained}
    assert len(digests) == 1
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return digests.pop(), outcomes[0]


@pytest.mark.parametrize("kind", KINDS[1:], ids=NAMES)
def test_all_kinds_come_to_the_same_bits_on_any_number_of_workers(kind: Kind) -> None:
    assert after_three_steps(kind) == after_three_steps(RING)


def test_each_lane_has_one_host(workers: list[Worker]) -> None:
    assert [lane for worker in workers for lane in worker.strategy.hosted] == list(range(LANES))
    assert [worker.strategy.worker for worker in that_train(workers)] == list(range(10, 10 + len(that_train(workers))))


def test_what_one_worker_is_asked_all_are(workers: list[Worker]) -> None:
    request = StepRequest("interrupted", Save.BEGIN)
    asked = that_train(workers)[-1]
    everyone = everywhere(workers, lambda w: w.step(1, request if w is asked else None))
    assert [outcome.request for outcome in everyone] == [request] * len(workers)


def test_payloads_are_gathered_in_lane_order(workers: list[Worker]) -> None:
    told = [str(worker.strategy.hosted.start).encode() if worker.strategy.hosted else b"" for worker in workers]
    everyone = everywhere(workers, lambda w: w.strategy.gather(1, told[workers.index(w)]))
    assert len(set(everyone)) == 1
    assert sorted(everyone[0]) == sorted(told)
    assert [payload for payload in everyone[0] if payload] == [payload for payload in told if payload]


def test_without_a_lease_nothing_changes(workers: list[Worker]) -> None:
    def refuse() -> None:
        raise LeaseExpired("the lease is over")

    def work(worker: Worker) -> tuple[BaseException | None, bool]:
        before = worker.replica.weights_digest()
        worker.check_lease = refuse
        error = error_of(lambda: worker.step(1))
        if not worker.strategy.hosted:
            worker.strategy.close()  # workers wait for what a server would have told them
        return error, worker.replica.weights_digest() == before

    told = everywhere(workers, work)
    waits = LinkError if len(that_train(workers)) < len(workers) else LeaseExpired
    assert all(isinstance(error, LeaseExpired | waits) and is_unchanged for error, is_unchanged in told)
    assert any(isinstance(error, LeaseExpired) for error, _ in told)


def test_a_loss_that_is_not_finite_raises_everywhere_before_anything_changes(workers: list[Worker]) -> None:
    that_train(workers)[-1].loss_factor = math.nan

    def work(worker: Worker) -> tuple[str, bool]:
        before = worker.replica.weights_digest()
        error = error_of(lambda: worker.step(1))
        assert isinstance(error, LossError)
        return str(error), worker.replica.weights_digest() == before

    told = everywhere(workers, work)
    assert told == [(told[0][0], True)] * len(workers)
    assert "not finite" in told[0][0]


def test_whoever_leaves_ends_the_wait_of_all_others(workers: list[Worker]) -> None:
    def work(worker: Worker) -> BaseException | None:
        if worker is workers[-1]:
            worker.strategy.close()
            return None
        return error_of(lambda: worker.step(1))

    assert all(isinstance(error, LinkError) for error in everywhere(workers, work)[:-1])
