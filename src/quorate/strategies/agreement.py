"""What all workers of a step agree on besides its gradients, over a `gather`: every synchronous strategy shares it.

Each worker sends, for each hosted lane, samples, loss, logged numbers, which parameters have a gradient, and digests of
changed buffers; what it is asked to do; and digests of the slice of its state whose turn it is, and of the settings of
its optimizers. Replicas that differ and a loss that is not finite raise here, before any weight changes.

A buffer that is bitwise equal in all lanes is taken as it is: averaging a constant over eight lanes would change almost
half of its elements. Otherwise its rule decides, and without a rule the job is refused. A lane without samples has no
say: where "lane 0" decides and has none, the first lane that has some does.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from operator import or_

import torch

from quorate.collectives.reduction import sum_lanes
from quorate.core.errors import LinkError, LossError, UnsupportedModelError
from quorate.core.failure import name_samples
from quorate.core.generation import Member, Role
from quorate.data.indices import NO_INDICES, indices_of
from quorate.data.ledger import NOTHING, Tally, total
from quorate.lanes.buckets import LANE_0, MEAN
from quorate.replica.buffers import Buffers
from quorate.replica.device import CPU, Device, digests
from quorate.replica.losses import LossSum, called, not_finite, summed
from quorate.replica.settings import Settings
from quorate.training.audit import AuditNote, LaneAudit
from quorate.training.divergence import COMPARE_INDEX, ReplicaDigests, Voucher, compare_replicas, divergence
from quorate.training.lane import LaneResult
from quorate.training.strategy import NOTHING_ASKED, Agreement, Save, Shortage, Skipped, StepRequest

log = logging.getLogger(__name__)

NOTES_INDEX = 0
BUFFERS_INDEX = 1
"""They tell apart what is gathered in one step; COMPARE_INDEX is another of them."""

Gather = Callable[[int, int, bytes], tuple[bytes, ...]]
"""(step, index, payload) → the payloads of all workers, in lane order."""

_REMEDY = (
    "Often the learning rate is too high (try a lower one, a warm-up, or clip_norm), or a sample holds a value that is "
    "not a number (`on_nonfinite_loss: skip` leaves such steps out)."
)
_NOT_THE_SAMPLES = (
    "It cannot be skipped (on_nonfinite_loss: skip): the samples are not the cause, since the weights are no longer "
    "finite. An earlier step made them so; often the learning rate is too high (try a lower one, a warm-up, or "
    "clip_norm)."
)


@dataclass(frozen=True)
class WorkerNote:
    """What a worker sends at each step: the results of its lanes, what it is asked to do, and digests: of the slice of
    its state whose turn it is, and of the settings of its optimizers. Of changed buffers only `digests` travel, by
    lane; of the samples that a lane has read only those of one whose loss is not finite."""

    lanes: Sequence[LaneResult]
    digests: Sequence[Mapping[str, str]]
    request: StepRequest
    state: int | None = 0
    settings: str = ""
    audit: AuditNote | None = None

    def encode(self) -> bytes:
        """As JSON, in which floats survive exactly."""
        lanes = [
            [
                lane.lane,
                lane.samples,
                hex(lane.present),  # Python refuses to write an integer of more than 4300 decimal digits
                {name: [loss.total, loss.count, loss.per_item] for name, loss in lane.losses.items()},
                lane.log,
                lane.tally.words,
                [] if not_finite(lane.losses) is None else lane.read.tolist(),
                lane.bad,
                lane.why,
                lane.data_s,
                lane.put_back,
                lane.micro_batches,
                lane.shortage,
                lane.digests,
            ]
            for lane in self.lanes
        ]
        request = [self.request.stop, self.request.save, self.request.leave]
        told = {"lanes": lanes, "digests": self.digests, "request": request, "state": self.state}
        audit = {} if self.audit is None else {"audit": asdict(self.audit)}
        return json.dumps(told | {"settings": self.settings} | audit).encode()

    @classmethod
    def decode(cls, payload: bytes) -> "WorkerNote":
        """Another worker's note: its lanes are without their tensors."""
        note = json.loads(payload)
        lanes = [
            LaneResult(
                lane,
                samples,
                int(present, 16),
                {name: LossSum(*loss) for name, loss in losses.items()},
                {name: (total, count) for name, (total, count) in logged.items()},
                {},
                Tally((tally[0], tally[1])),
                indices_of(read) if read else NO_INDICES,
                tuple(bad),
                tuple((index, text) for index, text in why),
                data_s,
                tuple(put_back),
                None,
                rest[0],
                rest[1],
                digests=tuple(rest[2]),
            )
            for lane, samples, present, losses, logged, tally, read, bad, why, data_s, put_back, *rest in note["lanes"]
        ]
        stop, save, leave = note["request"]
        audit = AuditNote(**note["audit"]) if "audit" in note else None
        request = StepRequest(stop, Save(save), leave)
        return cls(lanes, note["digests"], request, note["state"], note["settings"], audit)


@dataclass(eq=False)
class StepAgreement:
    """Reaches the agreement of each step among `members`, all of a generation, of which this is one.

    `skips`: a step whose loss is not finite is left out by everybody, instead of ending the job. Whoever has no replica
    of the whole, as servers have none, has no digests of it.
    """

    gather: Gather
    members: Sequence[Member]
    own: Member
    parameters: Sequence[torch.Tensor]
    buffers: Buffers
    digests: ReplicaDigests | None
    settings: Settings
    skips: bool
    audit: LaneAudit | None = None

    def __post_init__(self) -> None:
        self.is_alone = len(self.members) == 1
        self._roles = [Role.of(member.worker) for member in self.members]

    def reach(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        """The same on every worker. `results` are those of the hosted lanes, `request` is what this worker is asked."""
        is_audit = self.audit is not None and step >= self.audit.due
        is_lone = self.is_alone and len(results) == 1 and not is_audit
        if is_lone and (lone := _lone(results[0], request)) is not None:
            return lone
        notes = self._exchange_notes(step, results, request, is_audit=is_audit)
        lanes = [lane for note in notes for lane in note.lanes]
        shortage = shortage_of(lanes)
        if shortage is not None:
            return Agreement(0, NOTHING, 0, {}, {}, {}, NOTHING_ASKED, shortage=shortage)
        losses = summed([loss for lane in lanes for loss in lane.losses.items()])
        poisoned = [lane for lane in lanes if not_finite(lane.losses) is not None]
        # A replica that has changed makes losses that are not finite, too: that is no fault of the samples.
        states = {note.state for note in notes} - {None}
        settings = {(role, note.settings) for role, note in zip(self._roles, notes, strict=True)}
        differ = len(states) > 1 or len(settings) > len(dict(settings))
        if differ or (states and poisoned and not self.is_alone):
            self._compare_replicas(step, notes)
        # By what all have heard: a worker with a doubt that it keeps has an audit at a step where others have none.
        if self.audit is not None and any(note.audit is not None for note in notes):
            self._audit(step, self.audit, notes)
        if poisoned:
            check_skippable(step, poisoned, self.parameters, self.buffers, skips=self.skips)
        else:
            _check_counts(step, losses)
        has_changed = any(any(note.digests) for note in notes)
        agreed = _of_lanes(lanes, losses, poisoned, StepRequest.combine(note.request for note in notes))
        return agreed._replace(
            buffers=self._agree_on_buffers(step, results, notes, lanes) if has_changed and not poisoned else {},
            data_s=max(sum(lane.data_s for lane in note.lanes) for note in notes),
        )

    def conclude(
        self, step: int, lanes: Sequence[LaneResult], request: StepRequest, *, are_finite: bool, refused: str | None
    ) -> Agreement:
        """What `reach` would have come to, of a worker that is alone, in a step that was applied before it was read.

        `are_finite`: the weights were when the step began. `refused` is a buffer on which its lanes cannot agree. Of
        the others the device has seen to itself.
        """
        if len(lanes) == 1 and (lone := _lone(lanes[0], request)) is not None:
            return lone
        poisoned = [lane for lane in lanes if not_finite(lane.losses) is not None]
        if poisoned and not (self.skips and are_finite):
            raise _poisoned(step, poisoned, skips=self.skips)
        if refused is not None and not poisoned:
            raise _refused(refused, step)
        agreed = _of_lanes(lanes, total_losses(lanes), poisoned, request)
        return agreed._replace(data_s=sum(lane.data_s for lane in lanes))

    def _exchange_notes(
        self, step: int, results: Sequence[LaneResult], request: StepRequest, *, is_audit: bool
    ) -> list[WorkerNote]:
        changed = [digests(r.buffers.items(), self.buffers.device) if r.buffers else {} for r in results]
        audit = self.audit.note(step, results, changed) if self.audit is not None and is_audit else None
        if self.is_alone:
            return [WorkerNote(results, changed, request, audit=audit)]
        # The slice must be equal in all workers, but for those who have None.
        state = None if self.digests is None else self.digests.of_slice(step)
        own = WorkerNote(results, changed, request, state, self.settings.digest(), audit)
        return [WorkerNote.decode(payload) for payload in self.gather(step, NOTES_INDEX, own.encode())]

    def _audit(self, step: int, audit: LaneAudit, notes: Sequence[WorkerNote]) -> None:
        """Compare what was computed twice. A replica that has changed computes another result, too, and is told as
        such."""
        pairs = zip(self.members, notes, strict=True)
        told = {member.worker: note.audit for member, note in pairs if note.audit is not None and member.lanes}
        if (differing := audit.differing(step, told)) is not None:
            if not self.is_alone:
                self._compare_replicas(step, notes)
            audit.settle(step, differing, told)

    def _compare_replicas(self, step: int, notes: Sequence[WorkerNote]) -> None:
        """The whole state, which is still that of the step before: to name who differs, and where."""
        told = []
        for member, note in zip(self.members, notes, strict=True):
            part = {} if note.state is None else {"a slice of the state": f"{note.state:016x}"}
            told.append(Voucher(member.worker, part, is_partial=not part, settings={"their digest": note.settings}))
        proven = divergence(step - 1, told)
        held = {} if self.digests is None else self.digests.of_all()
        own = Voucher(self.own.worker, held, is_partial=self.digests is None, settings=self.settings.values())
        try:
            compare_replicas(step - 1, own, partial(self.gather, step, COMPARE_INDEX))
        except LinkError:
            # Whoever is gone takes its digests along, and not what is known already.
            if proven is not None:
                raise proven from None
            raise
        if proven is not None:
            log.warning("%s Yet all of it is equal: one of them was read wrongly.", proven)

    # --- buffers

    def _agree_on_buffers(
        self, step: int, results: Sequence[LaneResult], notes: Sequence[WorkerNote], lanes: Sequence[LaneResult]
    ) -> dict[str, torch.Tensor]:
        changed = {
            lane.lane: by_name
            for note in notes
            for lane, by_name in zip(note.lanes, note.digests, strict=True)
            if lane.samples
        }
        if not any(changed.values()):
            return {}
        adopted, averaged, differ = [], [], False
        for name in sorted({name for by_name in changed.values() for name in by_name}):
            if len({by_name.get(name) for by_name in changed.values()}) == 1:
                adopted.append(name)
            elif self.buffers.rules.get(name) == MEAN:
                averaged.append(name)
            elif self.buffers.rules.get(name) == LANE_0:
                adopted.append(name)
                differ = True
            else:
                raise _refused(name, step)
        first = next(iter(changed))
        holders = {first} if differ else changed.keys()
        values = {result.lane: result.buffers for result in results}
        if not self.is_alone and (averaged or any(holders.isdisjoint(member.lanes) for member in self.members)):
            values = self._exchange_buffers(step, results, adopted, averaged, first)
        source = first if first in values else next(lane for lane in values if lane in holders)
        agreed = {name: values[source].get(name, self.buffers.get(name)) for name in adopted}
        return agreed | self._averages(averaged, values, lanes)

    def _exchange_buffers(
        self, step: int, results: Sequence[LaneResult], adopted: Sequence[str], averaged: Sequence[str], first: int
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Of all lanes what is averaged, of the first what is adopted: by lane, as far as it has changed."""
        own = {}
        for result in results:
            names = (*averaged, *adopted) if result.lane == first else averaged
            own[result.lane] = {name: result.buffers[name] for name in names if name in result.buffers}
        everyone = [unpack(payload, self.buffers.device) for payload in self.gather(step, BUFFERS_INDEX, pack(own))]
        return {lane: values for told in everyone for lane, values in told.items()}

    def _averages(
        self, names: Sequence[str], values: Mapping[int, Mapping[str, torch.Tensor]], lanes: Sequence[LaneResult]
    ) -> dict[str, torch.Tensor]:
        """Weighted by samples, and summed in the order in which gradients are."""
        batch_samples = sum(lane.samples for lane in lanes)
        averages: dict[str, torch.Tensor] = {}
        for name in names:
            dtype = self.buffers.get(name).dtype
            if not dtype.is_floating_point:
                raise UnsupportedModelError(f"Buffer '{name}' is of type {dtype}, which has no mean over lanes.")
        wanted = frozenset(names)
        for dtype in {self.buffers.get(name).dtype for name in names}:
            group = [(name, self.buffers.get(name), gap) for name, gap in self.buffers.averaged[dtype]]
            flats = []
            for lane in lanes:
                own = values[lane.lane]
                parts = (((own.get(name, old) if name in wanted else old).reshape(-1), gap) for name, old, gap in group)
                flat = torch.cat([part for pair in parts for part in pair])
                flats.append(flat.mul_(lane.samples / batch_samples) if lane.samples else flat.zero_())
            mean = torch.empty_like(flats[0])
            sum_lanes(flats, mean)
            means = torch.split(mean, [size for _, old, gap in group for size in (old.numel(), gap.numel())])[::2]
            pairs = zip(group, means, strict=True)
            averages |= {name: mean.view(old.shape) for (name, old, _), mean in pairs if name in wanted}
        return averages


def _lone(lane: LaneResult, request: StepRequest) -> Agreement | None:
    """The only lane of a job has nobody to agree with. None where something is wrong with it."""
    if lane.shortage or not all(math.isfinite(loss.total) and loss.count > 0 for loss in lane.losses.values()):
        return None
    return Agreement(
        samples=lane.samples,
        tally=lane.tally,
        present=lane.present,
        losses=lane.losses,
        log=mean_log([lane]) if lane.log else {},
        buffers=lane.buffers,
        request=request,
        bad=lane.bad,
        why=lane.why,
        data_s=lane.data_s,
        put_back=tuple(sorted(set(lane.put_back))),
        digests=(lane.digests,) if lane.digests else (),
    )


def _of_lanes(
    lanes: Sequence[LaneResult], losses: dict[str, LossSum], poisoned: Sequence[LaneResult], request: StepRequest
) -> Agreement:
    """What follows from the results of all lanes, without their buffers."""
    return Agreement(
        samples=sum(lane.samples for lane in lanes),
        tally=lanes[0].tally if len(lanes) == 1 else total(lane.tally for lane in lanes),
        present=0 if poisoned else reduce(or_, (lane.present for lane in lanes)),
        losses=losses,
        log=mean_log(lanes) if not poisoned and any(lane.log for lane in lanes) else {},
        buffers={},
        request=request,
        skipped=skipped_of(poisoned) if poisoned else None,
        bad=tuple(sample for lane in lanes for sample in lane.bad),
        why=tuple(reason for lane in lanes for reason in lane.why),
        put_back=tuple(sorted({name for lane in lanes for name in lane.put_back})),
        digests=tuple(lane.digests for lane in lanes) if any(lane.digests for lane in lanes) else (),
    )


def pack(by_lane: Mapping[int, Mapping[str, torch.Tensor]]) -> bytes:
    """Tensors by lane and name, as bytes; those of one type in a row, for this is done in every step."""
    rows, groups = [], dict[str, list[torch.Tensor]]()
    for lane, values in by_lane.items():
        for name, value in values.items():
            dtype = str(value.dtype).removeprefix("torch.")
            rows.append((lane, name, dtype, value.shape))
            groups.setdefault(dtype, []).append(value.detach().cpu().reshape(-1))
    head = json.dumps([list(by_lane), rows]).encode()
    return b"".join([len(head).to_bytes(4), head, *(CPU.content(torch.cat(group)) for group in groups.values())])


def unpack(payload: bytes, device: Device = CPU) -> dict[int, dict[str, torch.Tensor]]:
    """What `pack` made bytes of."""
    start = 4 + int.from_bytes(payload[:4])
    lanes, rows = json.loads(payload[4:start])
    counts: dict[str, list[int]] = {}
    for _, _, dtype, shape in rows:
        counts.setdefault(dtype, []).append(math.prod(shape))
    pieces: dict[str, Iterator[torch.Tensor]] = {}
    for dtype, sizes in counts.items():
        values = torch.empty(sum(sizes), dtype=getattr(torch, dtype))
        content = CPU.content(values)
        content[:] = payload[start : start + len(content)]
        start += len(content)
        pieces[dtype] = iter(device.move(values).split(sizes))
    by_lane: dict[int, dict[str, torch.Tensor]] = {lane: {} for lane in lanes}
    for lane, name, dtype, shape in rows:
        by_lane[lane][name] = next(pieces[dtype]).view(shape)
    return by_lane


def _refused(name: str, step: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Buffer '{name}' was changed differently by the lanes of step {step}, and there is no rule for what it should "
        f'become. Name one in the task: buffer_rules = {{"{name}": "{MEAN}"}} or {{"{name}": "{LANE_0}"}}.'
    )


# --- memory


def shortage_of(lanes: Sequence[LaneResult]) -> Shortage | None:
    """Whether the step must be done again with more micro-batches: memory ran out in a lane, or lanes were cut into
    different numbers of them. That happens where somebody died while the others agreed on it, and some had heard."""
    tried = max(lane.micro_batches for lane in lanes)
    short = [lane for lane in lanes if lane.shortage and lane.micro_batches == tried]
    if not short and all(lane.micro_batches == tried for lane in lanes):
        return None
    return Shortage(tried, tuple(lane.lane for lane in short), short[0].shortage if short else "")


# --- losses


def check_skippable(
    step: int, poisoned: Sequence[LaneResult], parameters: Sequence[torch.Tensor], buffers: Buffers, *, skips: bool
) -> None:
    """Work whose loss is not finite is skipped if the job wants that and the samples are to blame."""
    if skips:
        values = (*parameters, *(value for _, value in buffers.committed()))
        if all(buffers.device.numbers([torch.isfinite(value).all() for value in values])()):
            return
    raise _poisoned(step, poisoned, skips=skips)


def _poisoned(step: int, poisoned: Sequence[LaneResult], *, skips: bool) -> LossError:
    # With weights that are not finite, every later loss would be like that: the job would skip its way to the end.
    remedy = _NOT_THE_SAMPLES if skips else _REMEDY
    return LossError(f"{_not_finite_at(step, poisoned[0])} {remedy}", skipped_of(poisoned).samples)


def skipped_of(poisoned: Sequence[LaneResult], *, is_partial: bool = False) -> Skipped:
    """What is left out of the lanes whose loss is not finite."""
    samples = tuple(index for lane in poisoned for index in lane.read.tolist())
    return Skipped(tuple(lane.lane for lane in poisoned), samples, is_partial)


def _not_finite_at(step: int, lane: LaneResult) -> str:
    found = not_finite(lane.losses)
    assert found is not None
    of_samples = f", which has read {name_samples(lane.read.tolist())}" if len(lane.read) else ""
    return (
        f"The {found[0]} is not finite ({found[1]}) at step {step} in lane {lane.lane}{of_samples}. "
        "No weight was changed by this step."
    )


def _check_counts(step: int, losses: Mapping[str, LossSum]) -> None:
    # The gradient is about to be divided by the count: by zero it would turn every weight into NaN.
    for name, loss in losses.items():
        if not loss.count > 0:
            raise LossError(
                f"The {called(name)} has a count of {loss.count} over all lanes at step {step}, so it has no mean. "
                "No weight was changed by this step. With (sum, count) something in each batch must count."
            )


def total_losses(lanes: Sequence[LaneResult]) -> dict[str, LossSum]:
    """The losses of these lanes together, by optimizer."""
    return summed(pair for lane in lanes for pair in lane.losses.items())


def mean_log(lanes: Sequence[LaneResult]) -> dict[str, float]:
    """The mean over samples of what the task has logged in these lanes, and of its metrics."""
    parts = ((name, LossSum(*sum_and_count)) for lane in lanes for name, sum_and_count in lane.log.items())
    return {name: logged.mean for name, logged in summed(parts).items()}
