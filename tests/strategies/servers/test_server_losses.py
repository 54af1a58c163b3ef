"""A member that dies at any gather of a job with servers, heard by only some of the others: the bits stay the same.

Members are threads that meet at a table. Whoever dies there has told some of the others what it had to tell, and the
rest that it is gone: so some complete what they were at, and others do not.
"""

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits.bit_tasks import Momentum
from quorate.checkpoint.store import CheckpointFolder
from quorate.collectives.block_sums import add_up_block, plan_blocks
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import GradientMemory, dtype_of
from quorate.core.errors import LinkError, PeerLost
from quorate.core.generation import Generation, GenerationId, Member, Role, server_id
from quorate.core.spans import SpanRecorder
from quorate.lanes.buckets import Bucket
from quorate.lanes.chunks import host_lanes
from quorate.replica.device import CPU
from quorate.replica.gradients import gradient_plan
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.strategies.compression.methods import method_of
from quorate.strategies.compression.option import lane_compression
from quorate.strategies.servers.compress import EncodedExchange
from quorate.strategies.servers.factory import ServersFactory
from quorate.strategies.servers.step import ServersConnection
from quorate.task.progress import Progress
from quorate.task.task import Task, configure
from quorate.training.activity import Activity
from quorate.training.loop import Loop
from quorate.wire.handshake import Credentials
from quorate.worker.assembly import Assembly, Hooks, SessionParts, build_samples, checkpointer_of

pytestmark = pytest.mark.usefixtures("unmeasured")

WORKERS, SERVERS, STEPS = 2, 2, 3
IDS = (*range(WORKERS), *(server_id(number) for number in range(SERVERS)))


@dataclass
class Death:
    """Of a member, at the gather or broadcast of this number; those who are `told` have its word."""

    member: int
    at: int
    told: Collection[int]
    has_fired: bool = False


@dataclass
class Table:
    """Where the members of one generation meet: a meeting is over when all have laid down something, or somebody has
    died."""

    members: tuple[int, ...]
    death: Death | None
    lock: threading.Condition = field(default_factory=threading.Condition)
    laid: dict[int, dict[int, bytes]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)

    def meet(self, member: int, number: int, payload: bytes) -> list[bytes]:
        with self.lock:
            meeting = self.laid.setdefault(number, {})
            death = self.death
            is_fatal = death is not None and death.member == member and death.at == number
            meeting[member] = payload
            if is_fatal and death is not None:
                death.has_fired = True
                self.dead.add(member)
            self.lock.notify_all()
            if is_fatal:
                raise PeerLost("itself", "killed")
            while len(meeting) < len(self.members):
                if any(gone not in meeting for gone in self.dead):
                    self._leave(member)
                self.lock.wait(60)
            if death is not None and death.has_fired and death.at == number and member not in death.told:
                self._leave(member)
            return [meeting[one] for one in self.members]

    def _leave(self, member: int) -> None:
        """It closes its links, so that nobody waits for it."""
        self.dead.add(member)
        self.lock.notify_all()
        raise PeerLost("a neighbour", "end of file")


class TableLinks:
    """A `Reduction` and an `Exchange` at a table."""

    overlaps = False
    spans: SpanRecorder | None = None

    def __init__(self, table: Table, generation: Generation, own: int, plan: Any, lanes: Any) -> None:
        self._table, self._own, self._generation = table, own, generation
        self._number = 0
        self._lanes, self._blocks = lanes, plan_blocks(plan, generation.lanes)
        self._plan: tuple[Bucket, ...] = plan

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        self._number += 1
        return tuple(self._table.meet(self._own, self._number, payload))

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        position = self._generation.position(self._own)
        told = self.gather(step, index, bytes(buffer) if position == root else b"")
        if position in receivers and position != root:
            buffer[:] = told[root]

    def all_reduce(self, *_: Any) -> None:
        raise AssertionError("servers sum")

    def round_trip(self) -> float | None:
        return None

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        return elements * itemsize

    def room(self, block: int) -> torch.Tensor:
        place = self._blocks[block]
        return torch.empty(place.slot.numel, dtype=dtype_of(self._plan[place.bucket]))

    def push(self, step: int) -> None:
        given = {lane: [bucket.clone() for bucket in buckets] for lane, buckets in self._lanes.items()}
        self._swap(given)

    def receive(self, step: int) -> None:
        self._pushed = self._swap({})

    def add_up(self, step: int, totals: Mapping[int, torch.Tensor]) -> None:
        for index, total in totals.items():
            block = self._blocks[index]
            place = slice(block.slot.offset, block.slot.offset + block.slot.numel)
            lanes = [self._pushed[lane][block.bucket][place] for lane in range(self._generation.lanes)]
            add_up_block(lanes, block.pieces, total)

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        self._swap({block: value.clone() for block, value in values.items()})

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        published = self._swap({})
        for block, value in values.items():
            value.copy_(published[block])

    def close(self) -> None:
        with self._table.lock:
            self._table.dead.add(self._own)
            self._table.lock.notify_all()

    def _swap(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Objects pass as they are: all are in one process."""
        key = (self._generation.id, self._number + 1, self._own)
        BOX[key] = own
        self.gather(0, 0, b"")
        swapped: dict[Any, Any] = {}
        for member in self._generation.members:
            swapped |= BOX[self._generation.id, self._number, member.worker]
        return swapped


BOX: dict[Any, Any] = {}


class NoSpokes:
    """Who is where; nothing is sent."""

    def __init__(self, generation: Generation, own: int) -> None:
        self.generation, self.position = generation, generation.position(own)
        self.servers = tuple(at for at, one in enumerate(generation.members) if one.role is Role.SERVER)


class TableEncoded(EncodedExchange):
    """What it sends is laid on the table."""

    links: TableLinks

    def push(self, step: int) -> None:
        own = self.spokes.position
        self.links._swap({(own, server): self.message_to(server) for server in self.spokes.servers})

    def receive(self, step: int) -> None:
        self.answer = b""
        self._received = [{} for _ in self._held(self.spokes.position)]
        for (worker, server), message in self.links._swap({}).items():
            if server == self.spokes.position:
                self.take_lanes(step, worker, memoryview(message))

    def publish(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        self.links._swap({self.spokes.position: self.answer_of(values)})

    def pull(self, step: int, values: Mapping[int, torch.Tensor]) -> None:
        for server, answer in self.links._swap({}).items():
            self.take_answer(step, server, memoryview(answer), values)

    def close(self) -> None:
        self.links.close()


class Living:
    """A process, in the words of the test: what it holds outlives a generation."""

    def __init__(self, task: type[Task], spec: JobSpec, worker: int, folder: Path, lane_memory: int) -> None:
        configured = configure(task, spec.params, "test", spec.seed)
        self.worker, self.spec = worker, spec
        self.replica = Replica(configured, spec, CPU)
        samples = build_samples(configured, spec)
        role = Role.of(worker)
        store = CheckpointFolder(folder)
        self.parts = SessionParts(spec, configured, self.replica, samples, {}, store, role, lane_memory=lane_memory)
        assert isinstance(self.parts.strategy, ServersFactory)
        self.factory = self.parts.strategy
        self.progress = Progress()
        self.ending: str | None = None

    def take_part(self, generation: Generation, table: Table) -> None:
        plan = gradient_plan(self.replica.trainable, self.spec.bucket_mb)
        own = generation.members[generation.position(self.worker)]
        memory = GradientMemory.of_process(plan, own.lanes)
        links: Any = TableLinks(table, generation, self.worker, plan, memory.lanes)
        credentials = Credentials("token", self.worker, generation.id)
        nothing: Any = None
        endpoint = Endpoint(generation, credentials, nothing, lambda: 10.0, lambda: 10.0)
        factory = self.factory
        placement = factory._place(endpoint)
        exchange = links
        if (compress := lane_compression(self.spec.strategy)) is not None:
            holders = [[generation.position(server) for server in of] for of in placement]
            spokes: Any = NoSpokes(generation, self.worker)
            blocks = range(len(self.replica.trainable))
            tells = compress.feedback
            exchange = TableEncoded(spokes, plan, holders, blocks, method_of(compress), tells_deltas=tells)
            exchange.links = links
        gradients = factory._gradients(memory)
        connection = ServersConnection(endpoint, links, gradients, factory.share, placement, self.spec, exchange)
        activity = Activity(lambda *_: None)
        loop: Loop | None = None
        try:
            self.progress, _ = connection.align(self.progress, activity, self._hold)
            hooks = Hooks(publish=lambda _: None, check_lease=gang.no_trouble, activity=activity)
            checkpointer = checkpointer_of(
                self.parts, publish=lambda _: None, check_lease=gang.no_trouble, check_commit=gang.no_trouble
            )
            rest = connection, self.progress, checkpointer, hooks
            loop = Assembly(self.parts, generation, self.worker, *rest).loop()
            # It ends without a checkpoint, which is not what this is about.
            loop._save = lambda: None  # type: ignore[method-assign]
            self.ending = loop.run()
        except LinkError:
            pass
        finally:
            if loop is not None:
                self.progress = loop.progress
            connection.close()

    def _hold(self, progress: Progress) -> None:
        self.progress = progress


def run(task: type[Task], folder: Path, *deaths: Death, refills: bool = False, **keys: Any) -> list[str]:
    """The digests of the workers at the end, through as many generations as it takes; one of the deaths in each."""
    compress = keys.pop("compress", None)
    strategy = {"kind": "parameter-server", "servers": SERVERS, "replicas": 2, "compress": compress}
    spec = gang.job(task, steps=STEPS, strategy=strategy, **keys)
    with lane_memory() as memory:
        living = {worker: Living(task, spec, worker, folder, memory) for worker in IDS}
        return live(living, task, spec, folder, memory, deaths, refills=refills)


@contextmanager
def lane_memory() -> Iterator[int]:
    """What an engine holds for the lanes of its host."""
    descriptor = os.memfd_create("lanes", os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def live(
    living: dict[int, Living],
    task: type[Task],
    spec: JobSpec,
    folder: Path,
    memory: int,
    deaths: Sequence[Death],
    *,
    refills: bool,
) -> list[str]:
    for number in range(1, 5):
        death = deaths[number - 1] if number <= len(deaths) else None
        members = sorted(living)
        workers = [one for one in members if Role.of(one) is Role.WORKER]
        hosting = dict(zip(workers, host_lanes(spec.lanes, len(workers)), strict=True))
        generation = Generation(
            GenerationId(1, number),
            tuple(
                Member(one, "", hosting.get(one, range(0)), "", living[one].progress.cursor, Role.of(one))
                for one in members
            ),
        )
        table = Table(tuple(members), death)
        threads = [threading.Thread(target=living[one].take_part, args=(generation, table)) for one in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "somebody waits for ever"
        if death is not None and death.has_fired:
            del living[death.member]
            if refills:
                living[death.member] = Living(task, spec, death.member, folder, memory)
        BOX.clear()
        ended = [one for one in living.values() if one.ending is not None]
        if len(ended) == len(living) and all(one.progress.cursor.step == STEPS for one in ended):
            break
        for one in living.values():
            one.ending = None
    assert all(one.progress.cursor.step == STEPS for one in living.values())
    return [one.replica.weights_digest() for one in living.values() if Role.of(one.worker) is Role.WORKER]


def deaths(until: int) -> list[Death]:
    """Of every member at every meeting, heard by every subset of the others."""
    found = []
    for at in range(1, until + 1):
        for member in IDS:
            others = [one for one in IDS if one != member]
            subsets = [subset for size in range(len(others)) for subset in combinations(others, size)]
            found += [Death(member, at, subset) for subset in subsets]
    return found


MEETINGS = 3 + 4 * STEPS
"""Three before the first step, and in each step push, notes, norms and pull."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    (digest,) = set(run(Momentum, tmp_path_factory.mktemp("undisturbed"), clip_norm=0.5))
    return digest


def check(death: Death, undisturbed: str, folder: Path, *, refills: bool, **keys: Any) -> None:
    digests = run(Momentum, folder, replace(death), refills=refills, clip_norm=0.5, **keys)
    assert set(digests) == {undisturbed}, death


TOLD = [death for death in deaths(MEETINGS) if len(death.told) in (0, 2)]


@pytest.mark.parametrize("refills", [False, True], ids=["fewer", "refilled"])
def test_whoever_dies_wherever_and_whoever_knows_the_bits_are_the_same(
    undisturbed: str, tmp_path: Path, refills: bool
) -> None:
    for number, death in enumerate(TOLD):
        if number % 23 == refills:
            check(death, undisturbed, tmp_path, refills=refills)


@pytest.mark.long
@pytest.mark.parametrize("refills", [False, True], ids=["fewer", "refilled"])
def test_every_death_heard_by_every_subset(undisturbed: str, tmp_path: Path, refills: bool) -> None:
    for death in deaths(MEETINGS):
        check(death, undisturbed, tmp_path, refills=refills)


def second_deaths() -> list[tuple[Death, Death]]:
    """A server dies in the first step; and in the next generation, while blocks are copied to another in its place,
    that one or a worker."""
    lost = IDS[-1]
    first = [Death(lost, 6, told) for told in ((), (0,), IDS[2:3])]
    then = [death for death in deaths(14) if death.member != IDS[2] and len(death.told) in (0, 1)]
    return [(one, other) for one in first for other in then]


@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.long if part else ()) for part in range(48)])
def test_another_may_die_while_the_state_is_copied(part: int, undisturbed: str, tmp_path: Path) -> None:
    for one, other in second_deaths()[part::48]:
        again = replace(other)
        digests = run(Momentum, tmp_path, replace(one), again, refills=True, clip_norm=0.5)
        assert again.has_fired
        assert set(digests) == {undisturbed}, (one, other)


def test_the_undisturbed_run_is_that_of_the_ring(undisturbed: str, tmp_path: Path) -> None:
    spec = gang.job(Momentum, steps=STEPS, clip_norm=0.5)
    assert gang.train(Momentum, spec, 1, tmp_path).digest == undisturbed


# --- with compression: lanes hold something back, and servers have exact values beside those that workers have

COMPRESS = {"top_k": 0.2}


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> str:
    (digest,) = set(run(Momentum, tmp_path_factory.mktemp("compressed"), clip_norm=0.5, compress=COMPRESS))
    return digest


@pytest.mark.parametrize(
    "refills", [pytest.param(False, id="fewer", marks=pytest.mark.long), pytest.param(True, id="refilled")]
)
def test_what_is_held_back_survives_whoever_dies(compressed: str, tmp_path: Path, refills: bool) -> None:
    for number, death in enumerate(TOLD):
        if number % 29 == refills:
            check(death, compressed, tmp_path, refills=refills, compress=COMPRESS)


@pytest.mark.long
@pytest.mark.parametrize("compress", [COMPRESS, {"bits": 8}], ids=str)
@pytest.mark.parametrize("refills", [False, True], ids=["fewer", "refilled"])
@pytest.mark.parametrize("part", range(4))
def test_what_is_held_back_survives_every_death_heard_by_every_subset(
    tmp_path: Path, compress: dict[str, Any], refills: bool, part: int
) -> None:
    (whole,) = set(run(Momentum, tmp_path, clip_norm=0.5, compress=compress))
    for death in deaths(MEETINGS)[part::4]:
        check(death, whole, tmp_path, refills=refills, compress=compress)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_another_may_die_while_what_is_held_back_finds_its_lane(part: int, compressed: str, tmp_path: Path) -> None:
    for one, other in second_deaths()[part::8]:
        digests = run(Momentum, tmp_path, replace(one), replace(other), refills=True, clip_norm=0.5, compress=COMPRESS)
        assert set(digests) == {compressed}, (one, other)


def test_compression_ends_with_the_digest_of_real_links(compressed: str, tmp_path: Path) -> None:
    strategy = {"kind": "parameter-server", "servers": 1, "compress": COMPRESS}
    spec = gang.job(Momentum, steps=STEPS, clip_norm=0.5, strategy=strategy)
    assert gang.train(Momentum, spec, 1, tmp_path).digest == compressed
