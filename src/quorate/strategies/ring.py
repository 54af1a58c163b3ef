"""The `ring` strategy: synchronous, and the same bits on any number of workers."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from quorate.checkpoint.attempt import Voucher
from quorate.core.errors import LinkError, LossError
from quorate.core.generation import Generation
from quorate.core.phases import OTHERS
from quorate.core.sample_names import name_samples
from quorate.data.ledger import total
from quorate.reduce.reduction import Reduction
from quorate.strategies.buffer_exchange import BufferExchange
from quorate.strategies.courier import Courier
from quorate.strategies.notes import LaneNote, WorkerNote, decode, encode, note_of
from quorate.training.activity import Activity
from quorate.training.buffers import Buffers
from quorate.training.divergence import COMPARE_INDEX, ReplicaDigests, compare_replicas, divergence
from quorate.training.gradients import Gradients
from quorate.training.lane import LaneResult, LossSum, called, not_finite
from quorate.training.strategy import Agreement, Skipped, strongest_wish

log = logging.getLogger(__name__)

NOTES_INDEX = 0
SHARE_INDEX = 2

_REMEDY = (
    "Often the learning rate is too high (try a lower one, a warm-up, or clip_norm), or a sample holds a value that is "
    "not a number (`on_poison: skip` leaves such steps out)."
)
_NOT_THE_SAMPLES = (
    "It cannot be skipped (on_poison: skip): the weights are not finite any more, so it is not for the samples. An "
    "earlier step has made them so; often the learning rate is too high (try a lower one, a warm-up, or clip_norm)."
)


class RingStrategy:
    """Sums the lanes' gradients around the ring, in the order that the job fixes. A courier begins with it earlier.

    `skips`: a step whose loss is not finite is left out by everybody, instead of ending the job.
    """

    def __init__(
        self,
        reduction: Reduction,
        generation: Generation,
        worker: int,
        gradients: Gradients,
        buffers: Buffers,
        digests: ReplicaDigests,
        courier: Courier | None = None,
        *,
        skips: bool = False,
        activity: Activity | None = None,
    ) -> None:
        self._activity = activity or Activity(lambda *_: None)
        self._reduction = reduction
        self._generation = generation
        self._member = generation.members[generation.position(worker)]
        self._is_alone = len(generation.members) == 1
        self._gradients = gradients
        self._courier = courier
        self._buffers = buffers
        self._digests = digests
        self._skips = skips
        self._buffer_exchange = BufferExchange(reduction, generation, buffers, first_index=gradients.sums)

    @property
    def worker(self) -> int:
        """Who this worker is."""
        return self._member.worker

    @property
    def hosted(self) -> range:
        """The lanes that this worker hosts."""
        return self._member.lanes

    def begin(self, step: int) -> None:
        """A step begins."""
        if self._courier is not None:
            self._courier.begin(step)

    def exchange(self, step: int, results: Sequence[LaneResult], stop: str | None) -> Agreement:
        """Gradients first, since their exchange may have begun with the backward pass; then notes; then buffers."""
        self._sum_gradients(step)
        everyone = self._tell_everyone(step, [note_of(result, self._buffers.device) for result in results], stop)
        notes = [note for told in everyone for note in told.lanes]
        losses = _total_losses(notes)
        wish = strongest_wish([told.stop for told in everyone])
        data_s = max(sum(note.data_s for note in told.lanes) for told in everyone)
        poisoned = [note for note in notes if not_finite(note.losses) is not None]
        # A replica that has changed makes losses that are not finite, too: that is no fault of the samples.
        if len({told.state for told in everyone}) > 1 or (poisoned and not self._is_alone):
            self._compare_replicas(step, everyone)
        if poisoned:
            return self._void(step, notes, poisoned, losses, wish, data_s)
        _check_counts(step, losses)
        return Agreement(
            samples=sum(note.samples for note in notes),
            tally=total(note.tally for note in notes),
            present=_union(notes),
            losses=losses,
            log=_mean_log(notes),
            buffers=self._buffer_exchange.agree(step, results, notes),
            stop=wish,
            bad=_bad(notes),
            why=_why(notes),
            data_s=data_s,
            put_back=_put_back(notes),
        )

    def _void(
        self,
        step: int,
        notes: Sequence[LaneNote],
        poisoned: Sequence[LaneNote],
        losses: dict[str, LossSum],
        stop: str | None,
        data_s: float,
    ) -> Agreement:
        """A step with a loss that is not finite: skipped if the job wants that and the samples are to blame."""
        samples = tuple(index for note in poisoned for index in note.suspects)
        if not self._skips:
            raise LossError(f"{_not_finite_at(step, poisoned[0])} {_REMEDY}", samples)
        if not self._state_is_finite():
            # Every later loss would be like that, and the job would skip its way to the end.
            raise LossError(f"{_not_finite_at(step, poisoned[0])} {_NOT_THE_SAMPLES}", samples)
        return Agreement(
            samples=sum(note.samples for note in notes),
            tally=total(note.tally for note in notes),
            present=0,
            losses=losses,
            log={},
            buffers={},
            stop=stop,
            skipped=Skipped(tuple(note.lane for note in poisoned), samples),
            bad=_bad(notes),
            why=_why(notes),
            data_s=data_s,
            put_back=_put_back(notes),
        )

    def _state_is_finite(self) -> bool:
        buffers = (value for _, value in self._buffers.committed())
        return all(bool(torch.isfinite(value).all()) for value in (*self._gradients.parameters, *buffers))

    def _sum_gradients(self, step: int) -> None:
        if self._courier is not None:
            self._courier.wait()
        else:
            self._gradients.sum_over(step, self._reduction)

    def _tell_everyone(self, step: int, lanes: list[LaneNote], stop: str | None) -> list[WorkerNote]:
        if self._is_alone:
            return [WorkerNote(lanes, stop)]
        own = WorkerNote(lanes, stop, self._digests.of_slice(step))
        return [decode(payload) for payload in self._reduction.gather(step, NOTES_INDEX, encode(own))]

    def _compare_replicas(self, step: int, everyone: Sequence[WorkerNote]) -> None:
        """The whole state, which is still that of the step before: to name who differs, and where."""
        slices = [
            Voucher(member.worker, {"a slice of the state": f"{told.state:016x}"})
            for member, told in zip(self._generation.members, everyone, strict=True)
        ]
        proven = divergence(step - 1, slices)
        own = Voucher(self.worker, self._digests.of_all())
        try:
            compare_replicas(step - 1, own, partial(self._reduction.gather, step, COMPARE_INDEX))
        except LinkError:
            # Whoever is gone takes its digests along, and not what is known already.
            if proven is not None:
                raise proven from None
            raise
        if proven is not None:
            log.warning("%s Yet all of it is equal: one of them was read wrongly.", proven)

    def share(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        """Everyone's payload, in lane order."""
        with self._activity.waiting(OTHERS):
            return self._reduction.gather(step, SHARE_INDEX, payload)

    def close(self) -> None:
        """Close the links to the neighbours, and let the parameters go: another generation has other gradients."""
        self._reduction.close()
        if self._courier is not None:
            self._courier.close()
        self._gradients.close()


def _bad(notes: Sequence[LaneNote]) -> tuple[int, ...]:
    return tuple(sample for note in notes for sample in note.bad)


def _why(notes: Sequence[LaneNote]) -> tuple[tuple[int, str], ...]:
    return tuple(told for note in notes for told in note.why)


def _put_back(notes: Sequence[LaneNote]) -> tuple[str, ...]:
    return tuple(sorted({name for note in notes for name in note.put_back}))


def _not_finite_at(step: int, note: LaneNote) -> str:
    trouble = not_finite(note.losses)
    assert trouble is not None
    of_samples = f", which has read {name_samples(note.suspects)}" if note.suspects else ""
    return (
        f"The {trouble[0]} is not finite ({trouble[1]}) at step {step} in lane {note.lane}{of_samples}. "
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


def _union(notes: Sequence[LaneNote]) -> int:
    present = 0
    for note in notes:
        present |= note.present
    return present


def _total_losses(notes: Sequence[LaneNote]) -> dict[str, LossSum]:
    totals: dict[str, LossSum] = {}
    for note in notes:
        for name, loss in note.losses.items():
            totals.setdefault(name, LossSum()).add(loss)
    return totals


def _mean_log(notes: Sequence[LaneNote]) -> dict[str, float]:
    sums: dict[str, LossSum] = {}
    for note in notes:
        for name, value in note.log.items():
            sums.setdefault(name, LossSum()).add(LossSum(value * note.samples, note.samples))
    return {name: total.mean for name, total in sums.items()}
