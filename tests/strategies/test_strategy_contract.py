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
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.core.errors import LeaseExpired, LinkError, LossError
from quorate.core.generation import Generation, GenerationId, Member, Role
from quorate.data.ledger import Tally
from quorate.data.sampler import LaneSampler
from quorate.lanes.chunks import host_lanes
from quorate.replica.gradients import Gradients
from quorate.replica.losses import LossSum
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.strategies.kinds import Connection, StrategyFactory, strategy_factory
from quorate.task.task import configure
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, Save, StepRequest, Strategy
from quorate.training.update import Update
from quorate.wire.handshake import Credentials
from strategies.toy_strategy import ToyFactory, ToyServer
from wire.pairs import within

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

    @property
    def has_server(self) -> bool:
        return self.name == "toy"

    @property
    def strategy(self) -> str:
        return "ddp" if self.name == "ddp" else "ring"


KINDS = [Kind("shm", 1), Kind("shm", 3), Kind("tcp", 2), Kind("toy", 1), Kind("toy", 3)]
GANGS = [Kind("ddp", 1), Kind("ddp", 2), Kind("ddp", 3)]
"""With bits that depend on the number of workers."""


class Worker:
    """A worker's replica, and its strategy once it is connected."""

    strategy: Strategy
    gradients: Gradients

    def __init__(self, strategy: str = "ring") -> None:
        self.spec = gang.job(Normed, lanes=LANES, batch_size=LANES * SAMPLES, clip_norm=10.0, strategy=strategy)
        self.task = configure(Normed, {}, "test", self.spec.seed)
        self.replica = Replica(self.task, self.spec)
        self.before_change: Callable[[], None] = gang.no_trouble
        self.loss_factor = 1.0

    def begin(self, connection: Connection) -> None:
        activity = Activity(lambda *_: None)
        activity.begin_step(1)
        watch = StateWatch(self.task, self.replica)
        self.gradients = connection.gradients
        sampler = LaneSampler(self.spec, len(Points()), self.task.order)
        may = gang.no_trouble, lambda: self.before_change()
        update = Update(self.spec, self.replica, self.gradients, watch, sampler, activity, *may)
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
    listeners = [Listeners.bind("127.0.0.1", shares_memory=kind.name in ("shm", "ddp")) for _ in hosting]
    for listener in listeners:
        stack.callback(listener.close)
    members = [
        Member(10 + i, each.network.address, lanes, each.local_address)
        for i, (each, lanes) in enumerate(zip(listeners, hosting, strict=True))
    ]
    if kind.has_server:
        members.append(Member(20, "the server", range(0), role=Role.SERVER))
    generation = Generation(GenerationId(1, 1), tuple(members))
    return [
        Endpoint(generation, Credentials("token", 10 + i, generation.id), each, within(100), within(100))
        for i, each in enumerate(listeners)
    ]


@contextmanager
def connected(kind: Kind) -> Iterator[list[Worker]]:
    workers = [Worker(kind.strategy) for _ in range(kind.workers)]
    with ExitStack() as stack:
        server = ToyServer(kind.workers) if kind.has_server else None
        if server is not None:
            stack.callback(server.join)

        def connect(worker: Worker, endpoint: Endpoint) -> Connection:
            factory: StrategyFactory = (
                strategy_factory(worker.spec, worker.replica)
                if server is None
                else ToyFactory(worker.spec, worker.replica, server)
            )
            return factory.connect(endpoint)

        with ThreadPoolExecutor(kind.workers) as threads:
            connections = list(threads.map(connect, workers, endpoints(kind, stack)))
        for worker, connection in zip(workers, connections, strict=True):
            stack.callback(connection.close)
            worker.begin(connection)
            stack.callback(worker.strategy.close)
            stack.callback(worker.__dict__.clear)  # an update knows its worker: in a circle its memory would stay
        del connections, connection, worker
        yield workers


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


@pytest.fixture(params=[*KINDS, *GANGS], ids=lambda kind: f"{kind.name}-{kind.workers}")
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with connected(request.param) as workers:
        yield workers


def test_all_kinds_come_to_the_same_bits_on_any_number_of_workers() -> None:
    outcomes, digests = [], set()
    for kind in KINDS:
        with connected(kind) as workers:
            for step in (1, 2, 3):
                everyone = everywhere(workers, lambda worker, step=step: worker.step(step))  # type: ignore[misc]
            outcomes += [known(outcome) for outcome in everyone]
            digests |= {worker.replica.weights_digest() for worker in workers}
    assert len(digests) == 1
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_each_lane_has_one_host(workers: list[Worker]) -> None:
    assert [lane for worker in workers for lane in worker.strategy.hosted] == list(range(LANES))
    assert [worker.strategy.worker for worker in workers] == list(range(10, 10 + len(workers)))


def test_what_one_worker_is_asked_all_are(workers: list[Worker]) -> None:
    request = StepRequest("interrupted", Save.BEGIN)
    everyone = everywhere(workers, lambda w: w.step(1, request if w is workers[-1] else None))
    assert [outcome.request for outcome in everyone] == [request] * len(workers)


def test_payloads_are_gathered_in_lane_order(workers: list[Worker]) -> None:
    everyone = everywhere(workers, lambda w: w.strategy.gather(1, str(w.strategy.hosted.start).encode()))
    starts = tuple(str(worker.strategy.hosted.start).encode() for worker in workers)
    assert everyone == [starts] * len(workers)


def test_without_a_lease_nothing_changes(workers: list[Worker]) -> None:
    def refuse() -> None:
        raise LeaseExpired("the lease is over")

    def work(worker: Worker) -> tuple[BaseException | None, bool]:
        before = worker.replica.weights_digest()
        worker.before_change = refuse
        return error_of(lambda: worker.step(1)), worker.replica.weights_digest() == before

    for error, is_unchanged in everywhere(workers, work):
        assert isinstance(error, LeaseExpired)
        assert is_unchanged


def test_a_loss_that_is_not_finite_raises_everywhere_before_anything_changes(workers: list[Worker]) -> None:
    workers[-1].loss_factor = math.nan

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
