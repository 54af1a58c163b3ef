"""The `ring` strategy: synchronous, and the same bits on any number of workers."""

from collections.abc import Mapping, Sequence

from quorate.core.errors import LossError
from quorate.core.generation import Generation
from quorate.reduce.reduction import Reduction
from quorate.strategies.buffer_exchange import BufferExchange
from quorate.strategies.courier import Courier
from quorate.strategies.notes import LaneNote, decode, encode, note_of
from quorate.training.buffers import Buffers
from quorate.training.gradients import Gradients
from quorate.training.lane import LaneResult, LossSum, called, not_finite
from quorate.training.strategy import Agreement

NOTES_INDEX = 0
SHARE_INDEX = 2


class RingStrategy:
    """Sums the lanes' gradients around the ring, in the order that the job fixes. A courier begins with it earlier."""

    def __init__(
        self,
        reduction: Reduction,
        generation: Generation,
        worker: int,
        gradients: Gradients,
        buffers: Buffers,
        courier: Courier | None = None,
    ) -> None:
        self._reduction = reduction
        self._member = generation.members[generation.position(worker)]
        self._is_alone = len(generation.members) == 1
        self._gradients = gradients
        self._courier = courier
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
        own = [note_of(result) for result in results]
        everyone = [(own, stop)] if self._is_alone else self._tell_everyone(step, own, stop)
        notes = [note for told, _ in everyone for note in told]
        losses = _total_losses(notes)
        _check_losses(step, notes)
        _check_counts(step, losses)
        return Agreement(
            samples=sum(note.samples for note in notes),
            present=_union(notes),
            losses=losses,
            log=_mean_log(notes),
            buffers=self._buffer_exchange.agree(step, results, notes),
            stop=next((wish for _, wish in everyone if wish is not None), None),
        )

    def _sum_gradients(self, step: int) -> None:
        if self._courier is not None:
            self._courier.wait()
        else:
            self._gradients.sum_over(step, self._reduction)

    def _tell_everyone(
        self, step: int, own: list[LaneNote], stop: str | None
    ) -> list[tuple[list[LaneNote], str | None]]:
        return [decode(payload) for payload in self._reduction.gather(step, NOTES_INDEX, encode(own, stop))]

    def share(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        """Everyone's payload, in lane order."""
        return self._reduction.gather(step, SHARE_INDEX, payload)

    def close(self) -> None:
        """Close the links to the neighbours, and let the parameters go: another generation has other gradients."""
        self._reduction.close()
        if self._courier is not None:
            self._courier.close()
        self._gradients.close()


def _check_losses(step: int, notes: Sequence[LaneNote]) -> None:
    for note in notes:
        trouble = not_finite(note.losses)
        if trouble is not None:
            raise LossError(
                f"The {trouble[0]} is not finite ({trouble[1]}) at step {step} in lane {note.lane}. "
                "No weight was changed by this step. Often the learning rate is too high (try a lower one, a warm-up, "
                "or clip_norm), or a sample holds a value that is not a number."
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
