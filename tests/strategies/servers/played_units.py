"""Workers and servers of a segment as threads of the test, over links that hold nothing."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from memory_link import memory_link_pair
from quorate.core.generation import GenerationId
from quorate.data.ledger import Tally
from quorate.data.sampler import LaneSampler
from quorate.replica.gradients import LoneGradients, gradient_plan
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.spec.job import JobSpec
from quorate.strategies.servers.dealing import Unit, UnitRecord, applied_everywhere
from quorate.strategies.servers.exchange import Blocks, Head, Parcel, UnitChannel, UnitPlan
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.placement import place
from quorate.strategies.servers.unit_loop import agreement_of
from quorate.strategies.servers.unit_server import Hub, StepSettings, UnitServer
from quorate.strategies.servers.unit_worker import UnitNote, UnitWorker
from quorate.task.task import Task
from quorate.training.lane import LaneResult, LaneRunner
from quorate.training.strategy import Agreement
from quorate.wire.link import Link

Before = Callable[[int, Unit], None]
Sending = Callable[[int, int, Head], None]
"""Of a worker, to a server."""


class Died(Exception):
    """A worker dies, by a test."""


class WatchedChannel(UnitChannel):
    """A test looks at what is sent, and may raise."""

    def __init__(self, link: Link, generation: GenerationId, sending: Callable[[Head], None]) -> None:
        super().__init__(link, generation, lambda: 60.0)
        self._sending = sending

    def send(self, head: Head, parcels: Sequence[Parcel] = (), blocks: Blocks | None = None) -> None:
        self._sending(head)
        super().send(head, parcels, blocks)


@dataclass
class Played:
    """Members of a job that stays the same through several generations: `play` runs a segment in a new one."""

    task: type[Task]
    spec: JobSpec
    servers: int = 1
    agreements: dict[int, Agreement] = field(default_factory=dict)
    late: Counter[int] = field(default_factory=Counter)
    largest_gap: int = 0
    step: int = 0
    generations: int = 0
    is_asked: bool = False
    """Whether somebody wants a boundary as soon as there can be one."""

    def __post_init__(self) -> None:
        strategy = self.spec.strategy
        assert isinstance(strategy, ServersSpec)
        self.strategy = strategy
        self.replicas = [Replica(self.task(), self.spec) for _ in range(self.servers)]
        shapes = self.replicas[0].trainable
        ids = range(100, 100 + self.servers)
        self.holders = place([name for name, _ in shapes], ids, strategy.replicas)
        self.records = [UnitRecord(self.spec.lanes) for _ in ids]
        for position, record in zip(ids, self.records, strict=True):
            record.reset(0, [block for block, places in enumerate(self.holders) if position in places])
        self.plan = UnitPlan(gradient_plan(shapes, self.spec.bucket_mb), self.holders, ids)
        samples = self.task().datasets()
        self.data = samples[0] if isinstance(samples, tuple) else samples
        self.sampler = LaneSampler(self.spec, len(self.data), self.task().order)

    def play(
        self,
        workers: int,
        boundary: int,
        before: Before = lambda _worker, _unit: None,
        sending: Sending = lambda _worker, _server, _head: None,
    ) -> list[BaseException]:
        """Train up to a boundary; what was raised, by servers and workers.

        `before` runs before each unit, `sending` before each message of a worker.
        """
        self.generations += 1
        generation = GenerationId(1, self.generations)
        ends: dict[int, dict[int, UnitChannel]] = {worker: {} for worker in range(workers)}
        served: dict[int, dict[int, UnitChannel]] = {server: {} for server in self.plan.servers}
        for worker in ends:
            for server in served:
                one, other = memory_link_pair((f"worker {worker}", f"server {server}"))
                ends[worker][server] = WatchedChannel(one, generation, partial(sending, worker, server))
                served[server][worker] = UnitChannel(other, generation, lambda: 60.0)
        raised: list[BaseException] = []
        settings = [StepSettings(r.optimizers, self.sampler, self.step) for r in self.replicas]
        self.hub = hub = self._hub(boundary)
        threads = []
        for index, (server, channels) in enumerate(served.items()):
            made = self._server(index, server, channels, settings[index])
            run = partial(made.run_segment, None if index else hub, lambda: None)
            threads.append(threading.Thread(target=_guarded, args=(raised, run)))
        for worker, channels in ends.items():
            run = partial(self._work, worker, channels, before)
            threads.append(threading.Thread(target=_guarded, args=(raised, run)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.late.update(hub.late)
        self.largest_gap = max(self.largest_gap, hub.largest_gap)
        if raised:
            for each in settings:
                each.go_back()
        else:
            self.step = hub.boundary
            for each in settings:
                each.reach(hub.boundary)
        return raised

    def _hub(self, boundary: int) -> Hub:
        sets = [each for record in self.records for each in record.sets()]
        begun = max(each.furthest for each in sets)
        completed = max(self.agreements, default=0)
        hub = Hub(applied_everywhere(sets), boundary, self.strategy.staleness, self._complete, begun, completed)
        if self.is_asked:
            hub.ask_for_boundary()
        return hub

    def values(self) -> dict[str, torch.Tensor]:
        """The parameters, each by its primary."""
        found = {}
        for block, (name, _) in enumerate(self.replicas[0].trainable):
            replica = self.replicas[self.holders[block][0] - 100]
            found[name] = dict(replica.trainable)[name].detach()
        return found

    def copies(self, block: int) -> list[torch.Tensor]:
        """A parameter by all who hold it."""
        return [self.replicas[place_ - 100].trainable[block][1].detach() for place_ in self.holders[block]]

    def _work(self, worker: int, channels: Mapping[int, UnitChannel], before: Before) -> None:
        try:
            self._worker(worker, channels, before).run_segment()
        finally:
            for channel in channels.values():
                channel.close()

    def _worker(self, worker: int, channels: Mapping[int, UnitChannel], before: Before) -> UnitWorker:
        task = self.task()
        replica = Replica(task, self.spec)
        with torch.no_grad():
            for parameter in replica.model.parameters():
                parameter.fill_(float("nan"))  # all of them are pulled
        runner = LaneRunner(task, replica, LoneGradients(replica.trainable), StateWatch(task, replica), self.spec.seed)

        def compute(unit: Unit) -> LaneResult:
            before(worker, unit)
            batches = []
            for samples in self.sampler.micro_batches(*unit):
                rows = [self.data[index] for index in samples.tolist()]
                batches.append((len(rows), torch.utils.data.default_collate(rows)))
            share = self.sampler.share(*unit)
            result = runner.run(unit.step, unit.lane, batches, len(share))
            result.read, result.tally = share, Tally.of(self.sampler.epoch_of(unit.step), share)
            return result

        return UnitWorker(self.plan, channels, replica, compute, self.sampler.batch_samples, lambda: False)

    def _server(
        self, index: int, position: int, channels: Mapping[int, UnitChannel], settings: StepSettings
    ) -> UnitServer:
        replica = self.replicas[index]
        record, damps = self.records[index], self.strategy.damping
        return UnitServer(position, self.plan, channels, replica, record, settings, lambda: None, damps=damps)

    def _complete(self, step: int) -> None:
        notes = [UnitNote.decode(self.records[0].notes[Unit(step, lane)]) for lane in range(self.spec.lanes)]
        assert step not in self.agreements
        self.agreements[step] = agreement_of(notes)


def _guarded(raised: list[BaseException], run: Callable[[], object]) -> None:
    try:
        run()
    except BaseException as error:
        raised.append(error)


def slowed(factor: float) -> Before:
    """One worker needs longer for a unit than the others."""
    return lambda worker, _unit: time.sleep(0.002 * (factor if worker == 0 else 1.0))
