"""The loop where units are applied one by one: from boundary to boundary instead of from step to step.

A boundary is a step at which something needs the state of that step and nothing else: an evaluation, a save, the end;
or the furthest step that was dealt when somebody asks for something. Between boundaries only blocks and their applied
sets change. Where a member stands (its progress, its cursor) changes at boundaries: if a generation ends between two of
them, the next one deals what is missing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quorate.core.worker_status import EXCHANGE, OTHERS
from quorate.data.ledger import total
from quorate.observe.seldom_events import StalenessObserved
from quorate.strategies.agreement import mean_log, pack, skipped_of, total_losses, unpack
from quorate.strategies.servers.dealing import AppliedSet, Unit, UnitRecord
from quorate.strategies.servers.member import MemberConnection, MemberStrategy
from quorate.strategies.servers.option import ServersSpec
from quorate.strategies.servers.units.channel import UnitChannel, UnitPlan
from quorate.strategies.servers.units.server import Hub, StepSettings, UnitServer
from quorate.strategies.servers.units.worker import UnitNote, UnitWorker
from quorate.training.activity import Activity
from quorate.training.lane import LaneResult
from quorate.training.loop import Loop
from quorate.training.progress import Progress
from quorate.training.strategy import NOTHING_ASKED, Agreement, Save, StepOutcome, StepRequest, Strategy

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
    """A member's segments; the gathers at boundaries are those of any strategy."""

    def __init__(
        self,
        connection: MemberConnection,
        plan: UnitPlan,
        channels: Mapping[int, UnitChannel],
        spec: ServersSpec,
        standing: Standing,
        activity: Activity,
    ) -> None:
        super().__init__(connection, activity)
        self.is_server = self.share.number is not None
        self.staleness = spec.staleness if spec.mode == "bounded" else None
        self.standing = standing
        self._plan = plan
        self._channels = channels
        self._damps = spec.damping
        self._server: UnitServer | None = None

    @property
    def record(self) -> UnitRecord:
        assert self.share.units is not None, "a server has a record of units"
        return self.share.units

    def equip(self, settings: StepSettings, before_change: Callable[[], None]) -> UnitServer | None:
        """Make a server ready to apply units. `before_change` raises where it may not."""
        if self.is_server:
            self._server = UnitServer(
                self._connection.endpoint.position,
                self._plan,
                self._channels,
                self.share.replica,
                self.record,
                settings,
                before_change,
                damps=self._damps,
            )
        return self._server

    def serve(self, hub: Hub | None, look: Callable[[], None]) -> None:
        """A server: answer the workers until they have come to the boundary."""
        assert self._server is not None, "it was equipped"
        with self._activity.waiting(OTHERS):
            self._server.run_segment(hub, look)

    def work(
        self,
        compute: Callable[[Unit], LaneResult],
        batch_samples: Callable[[int], int],
        wants_boundary: Callable[[], bool],
    ) -> int:
        """A worker: compute units until the boundary; where it is."""
        replica, activity = self.share.replica, self._activity
        worker = UnitWorker(self._plan, self._channels, replica, compute, batch_samples, wants_boundary, activity)
        return worker.run_segment()

    def begin(self, step: int) -> None:
        """Segments begin by themselves."""

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> StepOutcome:  # noqa: ARG002
        raise AssertionError("units are applied one by one: there is no step that all take together")


@dataclass
class UnitLoop(Loop):
    """Trains by segments. All members come to the same boundaries, where they meet."""

    by_units = True

    _settings: StepSettings = field(init=False)
    _server: UnitServer | None = field(init=False)
    _applied: AppliedSet = field(init=False)
    _begun: int = field(init=False)
    _is_boundary: bool = field(init=False)

    def __post_init__(self) -> None:
        self._settings = StepSettings(self.replica.optimizers, self.sampler, self.progress.cursor.step)
        self._server = self._units.equip(self._settings, self.check_lease)
        standing = self._units.standing
        self._applied, self._begun, self._is_boundary = standing.everywhere, standing.furthest, standing.is_boundary

    @staticmethod
    def publishes(strategy: Strategy, lanes: range) -> bool:  # noqa: ARG004
        return strategy.leads

    @property
    def _units(self) -> UnitStrategy:
        assert isinstance(self.strategy, UnitStrategy)
        return self.strategy

    def _step(self) -> StepRequest:
        """A segment: to the next boundary, and what all do there of what some are asked."""
        stood, units = self.progress, self._units
        self._is_boundary = False
        try:
            hub = self._hub() if units.leads else None
            # What is being saved must be copied before it changes; and a worker, which writes none of it, must have
            # told what it holds before it pulls what is newer.
            self.settle_save()
            if units.is_server:
                self.activity.begin_step(stood.cursor.step + 1)
                self.activity.enter(EXCHANGE)
                units.serve(hub, lambda: self._look(hub))
                self.activity.leave()
            elif units.hosted:
                units.work(self._compute, self.sampler.batch_samples, lambda: self.requested() != NOTHING_ASKED)
            request = self._meet(stood, hub)
            self.watch.begin()
            return request
        except BaseException:
            # Of what is done between boundaries only the servers' records know.
            self.progress = stood
            self._settings.go_back()
            raise

    def _save_is_due(self) -> bool:
        """Only at a boundary: a generation may have begun in the middle of a segment."""
        return self._is_boundary and super()._save_is_due()

    def _learning_rates(self, step: int) -> dict[str, float]:
        assert self._server is not None, "only servers tell steps"
        return self._server.learning_rates(step)

    # --- a worker

    def _compute(self, unit: Unit) -> LaneResult:
        """The lane's gradient of the mean over its own samples."""
        planned = len(self.sampler.share(unit.step, unit.lane))
        self.watch.begin()
        epoch = self.sampler.epoch_of(unit.step)
        result = self._hosted.run_lane(unit.step, epoch, unit.lane, planned, self.progress, self._last)
        self.watch.after_lanes()
        return result

    # --- a server

    def _hub(self) -> Hub:
        # An earlier hub may not have told some of the steps that are applied: each is written down once.
        completed, boundary = self.progress.cursor.step, self._next_boundary()
        return Hub(self._applied, boundary, self._units.staleness, self._complete_step, self._begun, completed)

    def _next_boundary(self) -> int:
        step, every = self.progress.cursor.step, self.spec.checkpoint.every
        last = min(self._last, step + LONGEST)
        for coming in range(step + 1, last):
            is_saved = self.sampler.ends_epoch(coming) if every == "epoch" else every and coming % every == 0
            if is_saved or self.evaluation.is_due(coming, self.sampler):
                return coming
        return last

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
        self._complete(step, *agreement_of(told))

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
        if self._units.is_server:
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


def agreement_of(notes: Sequence[UnitNote]) -> tuple[Agreement, dict[str, float]]:
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
    return agreement, norms
