"""A ring of one worker on a device that is not the host: steps are applied there before anybody has read them.

Whoever reads a loss waits until the device has computed it, and the device then waits until it is given the next step.
So what decides stays on the device: where a loss is not finite the step is void, and an update that is void changes
nothing (`Update.apply_unless`); where scaled gradients overflow, the optimizers leave it out. What informs, losses and
norms, is read some steps later, and only then is the step counted, told and judged: what was begun after a step that
ends the job is never told and never saved.

A step that needs the host is read at once, as everywhere: the bits are the same.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import torch

from quorate.lanes.buckets import MEAN
from quorate.replica.gradients import Gradients
from quorate.replica.loss_scale import judged
from quorate.replica.losses import GivenLoss
from quorate.replica.replica import Replica
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement
from quorate.training.lane import LaneResult, unread_scalars
from quorate.training.strategy import Agreement, Lag, PendingStep, StepRequest
from quorate.training.update import Update

_EXACT = 4
"""Bytes of a loss at most: of one in float64 the sum over lanes may overflow, which the device does not look at."""


class DeviceLag(Lag):
    """That of a worker that is alone."""

    def __init__(
        self,
        spec: JobSpec,
        replica: Replica,
        gradients: Gradients,
        agreement: StepAgreement,
        update: Update,
        exchange: Callable[[int, Sequence[LaneResult]], None],
    ) -> None:
        self._replica = replica
        self._gradients = gradients
        self._agreement = agreement
        self._update = update
        self._exchange = exchange
        self._skips = spec.on_nonfinite_loss == "skip"
        averaged = (name for name, rule in replica.buffers.rules.items() if rule == MEAN)
        # An average moves at each step that is not void; integers have no mean, and are refused when lanes differ.
        self._may_lag = replica.average is None and all(replica.buffers.get(n).is_floating_point() for n in averaged)
        self._predicable: tuple[int, int] | None = None
        self._rates = replica.optimizers.rates
        self._begun = self._finished = 0

    def can_take(self, results: Sequence[LaneResult]) -> bool:
        if not self._may_lag or (self._replica.buffers.exist and self._replica.buffers.flat is None):
            return False
        for result in results:
            # Memory ran out; the gradient is scaled by the samples that are left; something is told once, by name.
            if result.shortage or result.bad or result.put_back:
                return False
            if not result.samples:
                continue
            if result.unread is None or (self._replica.buffers.exist and result.taken is None):
                return False
            if any(loss.per_item or not self._is_exact(loss) for loss in result.unread.losses):
                return False
        return any(result.samples for result in results) and self._can_leave_out(_present(results))

    def begin(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> PendingStep:
        replica, activity = self._replica, self._update.activity
        self._exchange(step, results)
        if self._finished == self._begun:  # nothing is on its way
            self._rates = replica.optimizers.rates
        values = [loss.value.reshape(()) for result in results for loss in _losses(result)]
        # Whatever else makes a step void is to be added here, and to `conclude`.
        void = ~torch.isfinite(torch.stack(values)).all()
        # Before the update, which may make them so: the host looks at them before it, too.
        finite = [self._weights_are_finite()] if self._skips else []
        flat = replica.buffers.flat
        taken, refused = ((), []) if flat is None else flat.agree([(r.samples, r.taken) for r in results])
        activity.leave()
        norms = self._update.apply_unless(void, step, _present(results), taken)
        rates, self._begun = replica.optimizers.rates, step
        scaling = [] if replica.loss_scale is None else replica.loss_scale.scalars
        arriving = replica.device.numbers([*unread_scalars(results), *norms.values(), *refused, *finite, *scaling])
        for result in results:
            result.taken = None  # its memory is for the next

        def finish() -> Agreement:
            self._finished = step
            numbers = iter(arriving())
            for result in results:
                result.take_up(lambda _: next(numbers))
            read_norms = {name: next(numbers) for name in norms}
            name = None if flat is None else flat.refused([next(numbers) for _ in refused])
            were_finite = [next(numbers) for _ in finite]
            agreed = self._agreement.conclude(step, results, request, are_finite=all(were_finite), refused=name)
            if not agreed.is_void:
                self._rates = rates
                if scaling:
                    agreed = agreed._replace(scaling=judged(step, *numbers))
            elif step == self._begun:
                # The host would have left these alone.
                self._update.leave_out(step)
                replica.optimizers.rates = self._rates
            is_left_out = agreed.is_void or agreed.scaling.overflowed
            named = {key: float(each[0]) for key, each in zip(replica.optimizers.by_name, self._rates, strict=True)}
            return agreed._replace(norms={} if is_left_out else read_norms, learning_rates=named)

        return PendingStep(request, arriving, finish)

    def _is_exact(self, loss: GivenLoss) -> bool:
        own = self._replica.parameters[0][1].device
        return loss.value.is_floating_point() and loss.value.itemsize <= _EXACT and loss.value.device == own

    def _can_leave_out(self, present: int) -> bool:
        """Asked once for each set of parameters, since it takes long; a hook that is registered later is seen."""
        optimizers = self._replica.optimizers
        seen = present, optimizers.states
        if seen != self._predicable:
            parameters = [p for index, p in enumerate(self._gradients.parameters) if present >> index & 1]
            if not optimizers.can_leave_out(parameters):
                return False
            self._predicable = seen
        return optimizers.are_torchs_own

    def _weights_are_finite(self) -> torch.Tensor:
        flat = self._replica.buffers.flat
        buffers = () if flat is None else flat.all_committed
        values = [v for v in (*self._gradients.parameters, *buffers) if v.is_floating_point() and v.numel()]
        norms = torch._foreach_norm(values, float("inf"))
        return torch.isfinite(torch.stack(list(norms))).all()


def _present(results: Sequence[LaneResult]) -> int:
    return reduce(or_, (result.present for result in results))


def _losses(result: LaneResult) -> Sequence[GivenLoss]:
    return () if result.unread is None else result.unread.losses
