"""The modes `bounded` and `asynchronous`: a loop from boundary to boundary, where units are applied one by one.

A **unit** is a lane of a step. The **hub**, the first server, deals units to workers that are free. A worker pulls the
newest values, computes the lane's gradient and pushes it; the servers apply it at once, each to the blocks that it
holds. From one **boundary** to the next nobody waits for anybody else, except as the clock demands; at a boundary all
units up to a step are applied on every block, and nothing else is: there the state is evaluated and saved.

A boundary is a step at which something needs the state of that step and nothing else: an evaluation, a save, the end;
or the furthest step that was dealt when somebody asks for something. Between boundaries only blocks and their applied
sets change. Where a member stands (its progress, its cursor) changes at boundaries: if a generation ends between two of
them, the next one deals what is missing.

A block is what the units in it have made of it, wherever its server stands. So the holder with most of them gives it to
the others: replicas follow their primary, and whoever has more has all that the others have. What nobody was told to be
done may be in some blocks and not in others; it is dealt again, and applied where it is missing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quorate.checkpoint.tree import Encoded, decode, encode
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint
from quorate.collectives.neighbours import watch
from quorate.core.generation import EXCHANGE, OTHERS, Role
from quorate.data.ledger import total
from quorate.observe.seldom_events import StalenessObserved
from quorate.replica.device import digests
from quorate.replica.gradients import LoneGradients, gradient_plan
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import mean_log, pack, skipped_of, total_losses, unpack
from quorate.strategies.servers.align import Aligner, Transfer
from quorate.strategies.servers.dealing import AppliedSet, Unit, UnitRecord, applied_everywhere
from quorate.strategies.servers.exchange import UnitChannel, UnitPlan
from quorate.strategies.servers.links import LinkedReduction, connect_star
from quorate.strategies.servers.member import MemberConnection, MemberStrategy
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.placement import Holders
from quorate.strategies.servers.share import Share
from quorate.strategies.servers.unit_server import Hub, StepSettings, UnitServer
from quorate.strategies.servers.unit_worker import UnitNote, UnitWorker
from quorate.strategies.state_copy import Passing
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.divergence import COMPARE_INDEX, Voucher, compare_replicas
from quorate.training.lane import LaneResult
from quorate.training.loop import Loop
from quorate.training.strategy import NOTHING_ASKED, Agreement, Save, StepRequest, Strategy
from quorate.training.update import Update

LONGEST = 1_000
"""Steps of a segment at most: servers keep the notes of all its units, and tell them again after a loss."""


@dataclass(frozen=True)
class Standing:
    """What all servers have after they were aligned: the units that are applied on every block; the latest step of
    which any block has one; and whether there is nothing else, so that the state is that of a boundary."""

    everywhere: AppliedSet
    furthest: int
    is_boundary: bool


class UnitStrategy(MemberStrategy):
    """What a member trains with; its loop goes from boundary to boundary, where gathers are those of any strategy."""

    connection: "UnitConnection"

    @property
    def staleness(self) -> int | None:
        return self.connection.spec.staleness

    @property
    def record(self) -> UnitRecord:
        assert self.share.units is not None, "a server has a record of units"
        return self.share.units

    def begin(self, step: int) -> None:
        """Segments begin by themselves."""

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:  # noqa: ARG002
        raise AssertionError("units are applied one by one: there is no step that all take together")


@dataclass
class UnitLoop(Loop):
    """Trains by segments. All members come to the same boundaries, where they meet."""

    by_units = True

    _settings: StepSettings = field(init=False)
    _server: UnitServer | None = field(init=False, default=None)
    _worker: UnitWorker | None = field(init=False, default=None)
    _applied: AppliedSet = field(init=False)
    _begun: int = field(init=False)
    _is_boundary: bool = field(init=False)

    def __post_init__(self) -> None:
        self._settings = StepSettings(self.replica.optimizers, self.sampler, self.progress.cursor.step)
        units, standing = self._units, self._units.connection.standing
        plan, channels = units.connection.plan, units.connection.channels
        if units.share.number is not None:
            position, damps = units.connection.endpoint.position, units.connection.spec.damping
            made = plan, channels, self.replica, units.record, self._settings, self.check_lease
            self._server = UnitServer(position, *made, damps=damps)
        elif units.hosted:
            asks = self._compute, self.sampler.batch_samples, lambda: self.requested() != NOTHING_ASKED
            self._worker = UnitWorker(plan, channels, self.replica, *asks, self.activity)
        self._applied, self._begun, self._is_boundary = standing.everywhere, standing.furthest, standing.is_boundary

    @staticmethod
    def publishes(strategy: Strategy, lanes: range) -> bool:  # noqa: ARG004
        return strategy.leads

    @property
    def _units(self) -> UnitStrategy:
        assert isinstance(self.strategy, UnitStrategy)
        return self.strategy

    def _step(self, step: int) -> StepRequest:  # noqa: ARG002
        """A segment: to the next boundary, and what all do there of what some are asked."""
        stood, units = self.progress, self._units
        self._is_boundary = False
        try:
            hub = self._hub() if units.leads else None
            # What is being saved must be copied before it changes; and a worker, which writes none of it, must have
            # told what it holds before it pulls what is newer.
            self.checkpointer.settle_before()
            if self._server is not None:
                self.activity.begin_step(stood.cursor.step + 1)
                self.activity.enter(EXCHANGE)
                with self.activity.waiting(OTHERS):
                    self._server.run_segment(hub, lambda: self._look(hub))
                self.activity.leave()
            elif self._worker is not None:
                self._worker.run_segment()
            request = self._meet(stood, hub)
            self.watch.settings.begin()
            return request
        except BaseException:
            # Of what is done between boundaries only the servers' records know.
            self.progress = stood
            self._settings.go_back()
            raise

    def _save_is_due(self) -> bool:
        """Only at a boundary: a generation may have begun in the middle of a segment."""
        return self._is_boundary and super()._save_is_due()

    # --- a worker

    def _compute(self, unit: Unit) -> LaneResult:
        """The lane's gradient of the mean over its own samples."""
        planned = len(self.sampler.share(unit.step, unit.lane))
        self.watch.settings.begin()
        result = self._hosted.run_lane(unit.step, unit.lane, self.progress, batch_samples=planned)
        self.watch.after_lanes()
        return result

    # --- a server

    def _hub(self) -> Hub:
        # An earlier hub may not have told some of the steps that are applied: each is written down once.
        completed, boundary = self.progress.cursor.step, min(self._last, self._next_due(LONGEST))
        return Hub(self._applied, boundary, self._units.staleness, self._complete_step, self._begun, completed)

    def _look(self, hub: Hub | None) -> None:
        """Now and then, while workers are served: whether this server may go on, and what it is asked."""
        self.check_lease()
        if (oldest := self._units.record.base.oldest_unapplied) > self.activity.step:
            self.activity.begin_step(oldest)
            self.activity.enter(EXCHANGE)
            self.activity.advance()
        if hub is not None and (self.requested() != NOTHING_ASKED or self.checkpointer.is_wanted(by_time=True)):
            hub.ask_for_boundary()

    def _complete_step(self, step: int) -> None:
        """All units of a step are applied: tell what they come to, from their notes."""
        notes = self._units.record.notes
        told = [UnitNote.decode(notes[Unit(step, lane)]) for lane in range(self.spec.lanes)]
        assert self._server is not None, "only servers tell steps"
        self._complete(step, agreement_of(told)._replace(learning_rates=self._server.learning_rates(step)))

    # --- at a boundary

    def _meet(self, stood: Progress, hub: Hub | None) -> StepRequest:
        """Everybody takes up what the hub says of the segment, and does what anybody is asked."""
        request = self.requested()
        if request.save is Save.NONE and self.checkpointer.is_wanted(by_time=self._units.leads):
            request = replace(request, save=Save.BEGIN)
        told = self._units.gather(stood.cursor.step, self._word(request, hub))
        words = [json.loads(payload.partition(b"\n")[0]) for payload in told]
        progress = Progress.from_dict(words[0]["progress"])
        boundary = progress.cursor.step
        if self._server is not None:
            self._reach(stood, boundary, told[0].partition(b"\n")[2])
        if hub is not None and boundary > stood.cursor.step:
            self.publish(
                StalenessObserved(
                    step=boundary,
                    from_step=stood.cursor.step,
                    updates={str(updates): count for updates, count in sorted(hub.late.items())},
                    gap=hub.largest_gap,
                    bound=self._units.staleness,
                )
            )
        self._settings.reach(boundary)
        self.progress, self._is_boundary = progress, True
        self._applied, self._begun = AppliedSet(self.spec.lanes, boundary), boundary
        if not self._is_warm:
            self.checkpointer.prepare(self.progress, self.workers)
            self._is_warm = True
        return StepRequest.combine(
            StepRequest(stop, Save(save), leave) for stop, save, leave in (word["request"] for word in words)
        )

    def _word(self, request: StepRequest, hub: Hub | None) -> bytes:
        word: dict[str, Any] = {"request": [request.stop, request.save, request.leave]}
        if hub is None:
            return json.dumps(word).encode()
        word["progress"] = self.progress.to_dict()
        buffers = pack({0: dict(self.replica.buffers.committed())}) if self.replica.buffers.exist else b""
        return json.dumps(word).encode() + b"\n" + buffers

    def _reach(self, stood: Progress, boundary: int, buffers: bytes) -> None:
        """A server: check that everything up to the boundary is applied and nothing else, and begin anew from there."""
        record = self._units.record
        wrong = [applied for applied in record.sets() if applied != AppliedSet(self.spec.lanes, boundary)]
        if wrong:
            raise AssertionError(f"at the boundary of step {boundary} there is a block with {wrong[0]}")
        if not self._units.leads:
            # As the hub has told them: whoever outlives it tells them again.
            for step in range(stood.cursor.step + 1, boundary + 1):
                self._complete_step(step)
            if buffers:
                self.replica.buffers.commit(unpack(buffers).get(0, {}))
        record.reset(boundary, self._units.share.held)


def agreement_of(notes: Sequence[UnitNote]) -> Agreement:
    """What all units of a step come to, and the mean of their norms by samples.

    A unit whose loss is not finite is left out, and only that unit: the others of its step are applied already.
    """
    lanes = [note.result for note in notes]
    good = [note for note in notes if not note.is_skipped]
    poisoned = [note.result for note in notes if note.is_skipped]
    used = [note.result for note in good]
    samples = sum(lane.samples for lane in used)
    agreement = Agreement(
        samples=samples,
        tally=total(lane.tally for lane in lanes),
        present=0,
        losses=total_losses(used),
        log=mean_log(used),
        buffers={},
        request=NOTHING_ASKED,
        skipped=skipped_of(poisoned, is_partial=bool(samples)) if poisoned else None,
        bad=tuple(sample for lane in lanes for sample in lane.bad),
        why=tuple(reason for lane in lanes for reason in lane.why),
        data_s=max(lane.data_s for lane in lanes),
        put_back=tuple(sorted({name for lane in lanes for name in lane.put_back})),
    )
    norms: dict[str, float] = {}
    for note in good:
        for name, norm in note.norms.items():
            norms[name] = norms.get(name, 0.0) + norm * note.result.samples / samples
    return agreement._replace(norms=norms)


# --- what members come to hold before the first step

SETS_INDEX = 10
"""Tells the applied sets from what else is gathered before the first step."""


def connect_units(spec: JobSpec, share: Share, endpoint: Endpoint, placement: Sequence[Holders]) -> "UnitConnection":
    """Waits for the other members: all of them are joined for gathers, and each worker is linked to each server."""
    reduction, _ = connect(endpoint, ())
    try:
        links = connect_star(endpoint, reduction)
    except BaseException:
        reduction.close()
        raise
    generation, trainable = endpoint.generation, share.replica.trainable
    deadline, _ = watch(endpoint, list(links.values()))
    staying = [at for at, member in enumerate(generation.members) if member.role is Role.SERVER]
    workers = [at for at, member in enumerate(generation.members) if member.role is Role.WORKER]
    peers = staying if endpoint.position in workers else workers if endpoint.position in staying else []
    channels = {peer: UnitChannel(links[peer], generation.id, deadline) for peer in peers}
    holders = [[generation.position(server) for server in places] for places in placement]
    plan = UnitPlan(gradient_plan(trainable, spec.bucket_mb), holders, staying)
    joined, gradients = LinkedReduction(reduction, links), LoneGradients(trainable)
    assert isinstance(spec.strategy, ServersSpec)
    return UnitConnection(endpoint, joined, gradients, share, placement, plan, channels, spec.strategy)


@dataclass
class UnitConnection(MemberConnection):
    """One member's connection to the others of its generation."""

    loop = UnitLoop
    plan: UnitPlan
    channels: Mapping[int, UnitChannel]
    spec: ServersSpec
    standing: Standing = field(init=False)

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        aligner = UnitAligner(self.generation, self.own.worker, self.links, self.share, activity, hold)
        progress, copied, self.standing = aligner.align(progress, self.placement)
        self.log_placement()
        return progress, copied

    def strategy(self, update: Update, activity: Activity) -> UnitStrategy:  # noqa: ARG002
        return UnitStrategy(self, activity)


@dataclass
class UnitAligner(Aligner):
    """Aligns one member."""

    def align(self, progress: Progress, placement: Sequence[Holders]) -> tuple[Progress, int, Standing]:
        """The progress that it has then, the bytes that were copied, and where all servers stand."""
        record = self.share.units
        versions: Mapping[int, int] = {} if record is None else record.versions(self.generation.cursor.step)
        progress, copied = self.run(progress, placement, versions=versions)
        told = self._sets()
        # What is only in the base of another was never told to be done, and is dealt again.
        bases = {position: AppliedSet.from_json(base) for position, (_, base) in told.items()}
        donor = max(bases, key=lambda position: (len(bases[position]), -position))
        if receivers := tuple(position for position, base in bases.items() if base != bases[donor]):
            copied += self._copy_base(donor, receivers)
        # By what they have told, all have taken up their blocks.
        self.share.drop_surplus()
        sets = [AppliedSet.from_json(each) for blocks, _ in told.values() for each in blocks] + [bases[donor]]
        is_boundary = all(each == AppliedSet(each.lanes, progress.cursor.step) for each in sets)
        return progress, copied, Standing(applied_everywhere(sets), max(each.furthest for each in sets), is_boundary)

    def _sets(self) -> dict[int, tuple[list[Any], Any]]:
        """The sets of each server's blocks and of its base, by position; those who leave only give."""
        record, mine = self.share.units, None
        if record is not None:
            # Equal ones once: mostly all are.
            blocks = {json.dumps(record.blocks[block].to_json()) for block in self.share.placed}
            mine = [[json.loads(each) for each in sorted(blocks)], record.base.to_json()]
        everyone = [json.loads(told) for told in self._gather(SETS_INDEX, json.dumps(mine).encode())]
        return {position: (told[0], told[1]) for position, told in enumerate(everyone) if told is not None}

    def _copy_base(self, donor: int, receivers: tuple[int, ...]) -> int:
        """Buffers and notes, to servers that lack some of them."""
        position, record = self.generation.position(self.worker), self.share.units
        passing = Passing(self.generation, position, self.reduction, self.activity)
        given = None
        if position == donor and record is not None:
            buffers = dict(self.share.replica.buffers.committed())
            given = encode({"buffers": buffers, "units": record.of_base()})
        encoded, size = passing.copy(donor, receivers, given)
        if encoded is not None and record is not None:
            tree = decode(encoded.skeleton, encoded.tensors)
            self.share.replica.buffers.commit(tree["buffers"])
            record.take_base(tree["units"])
        return size

    def _given(self, transfer: Transfer, progress: Progress) -> Encoded:
        if not transfer.blocks or transfer.values_only:
            return super()._given(transfer, progress)
        assert self.share.units is not None, "only servers give blocks"
        applied = [[block, self.share.units.blocks[block].to_json()] for block in transfer.blocks]
        return encode(self.share.blocks(transfer.blocks) | {"applied": applied})

    def _take(self, transfer: Transfer, tree: dict[str, Any], progress: Progress) -> Progress:
        progress = super()._take(transfer, tree, progress)
        if "applied" in tree and self.share.units is not None:
            self.share.units.blocks |= {block: AppliedSet.from_json(applied) for block, applied in tree["applied"]}
        return progress

    def _compare(self, step: int, *, is_sound: bool) -> None:  # noqa: ARG002
        """Holders of a block that have as many units in it must hold the same; of buffers each has its own."""
        share, applied = self.share, {} if self.share.units is None else self.share.units.blocks
        values = [(block, *share.replica.trainable[block]) for block in sorted(share.held & applied.keys())]
        held = {f"{name} with {len(applied[block])} units": value.detach() for block, name, value in values}
        voucher = Voucher(self.worker, digests(held.items(), share.replica.device), is_partial=True)
        compare_replicas(step, voucher, partial(self._gather, COMPARE_INDEX))
