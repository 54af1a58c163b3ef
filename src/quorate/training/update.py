"""From the agreed gradient to new weights: the same kernels on the same bits in every worker."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from quorate.core.cached import cached_property
from quorate.core.digests import derive_seed
from quorate.core.generation import APPLY
from quorate.data.sampler import Sampler
from quorate.replica.gradients import Gradients
from quorate.replica.loss_scale import judged
from quorate.replica.optimizers import SOLE
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.spec.job import JobSpec
from quorate.training.activity import Activity
from quorate.training.audit import LaneAudit
from quorate.training.strategy import Agreement


@dataclass(eq=False)
class Update:
    """Applies a step's agreement to the replica.

    Before anything changes `settle` waits for what is still read of the state, and `check_lease` raises where this
    worker may not change it. `check_gradients` is called with each step whose gradients are where the optimizers look
    for them. `audit` is for whoever agrees on steps before they are applied.
    """

    spec: JobSpec
    replica: Replica
    gradients: Gradients
    watch: StateWatch
    sampler: Sampler
    activity: Activity
    settle: Callable[[], None]
    check_lease: Callable[[], None]
    check_gradients: Callable[[int], None] | None = None
    audit: LaneAudit | None = None

    def apply(self, step: int, agreement: Agreement) -> Agreement:
        """Update parameters and buffers; the agreement with the norm of each optimizer's gradient, before clipping."""
        self.begin()
        if agreement.is_void:
            self.leave_out(step)
        else:
            self.install(agreement.present, agreement)
            if self.check_gradients is not None:
                self.check_gradients(step)
            if self.has_plain_norm:
                agreement = agreement._replace(norms={SOLE: self.gradients.total_norm(self.replica.device)})
            else:
                agreement = self._with_norms(step, agreement)
            optimizers = self.replica.optimizers
            self.change(step, agreement, optimizers.leave_out if agreement.scaling.overflowed else optimizers.update)
        self.activity.leave()
        return agreement

    def begin(self) -> None:
        """The state is about to change; the activity is left when it has. Raises where this worker may not."""
        self.settle()
        self.check_lease()
        self.activity.enter(APPLY)

    def _with_norms(self, step: int, agreement: Agreement) -> Agreement:
        """Where gradients are clipped or scaled, or optimizers are several; none of a step that has overflowed."""
        begun, loss_scale = self._norms(self.replica.optimizers.by_name), self.replica.loss_scale
        if loss_scale is None:
            read = self.replica.device.numbers([*begun.values()])()
            return agreement._replace(norms=dict(zip(begun, read, strict=True)))
        loss_scale.move()
        read = self.replica.device.numbers([*begun.values(), *loss_scale.scalars])()
        scaling = judged(step, *read[len(begun) :])
        norms = {} if scaling.overflowed else dict(zip(begun, read, strict=False))
        return agreement._replace(scaling=scaling, norms=norms)

    @cached_property
    def has_plain_norm(self) -> bool:
        """Whether it is only told: then it is computed in a fraction of the time that `clip_grad_norm_` takes."""
        is_plain = self.spec.clip_norm is None and self.replica.loss_scale is None
        return is_plain and list(self.replica.optimizers.by_name) == [SOLE]

    def apply_unless(
        self, void: torch.Tensor, step: int, present: int, buffers: tuple[torch.Tensor, ...]
    ) -> dict[str, torch.Tensor]:
        """Begin the update on the device, where it leaves everything as it is if the step turns out to be `void`, and
        the parameters if its gradients overflow.

        For a step of which nothing has been read: the norms are still on the device, too. No code of the task may run
        in it (`Optimizers.can_leave_out`), and nobody averages the parameters.
        """
        self.begin()
        replica, optimizers = self.replica, self.replica.optimizers
        self.install(present)
        left_out = void
        if replica.loss_scale is not None:
            replica.loss_scale.move(void)
            left_out = void | replica.loss_scale.found_overflow
        norms = {SOLE: self.gradients.norm()} if self.has_plain_norm else self._norms(optimizers.by_name)
        if optimizers.are_scheduled_by_job:
            optimizers.prepare(step, self.sampler)
        if replica.buffers.flat is not None:
            replica.buffers.flat.commit_unless(void, buffers)
        optimizers.update_unless(left_out)
        self.activity.leave()
        return norms

    def install(self, present: int, agreement: Agreement | None = None) -> None:
        """Put the sums where the optimizers look for them; of a step that was read, as gradients of a mean."""
        loss_scale = self.replica.loss_scale
        scales = agreement is not None and (agreement.bad or any(loss.per_item for loss in agreement.losses.values()))
        self.gradients.install(present, bool(scales) or self.spec.clip_norm is not None or loss_scale is not None)
        if loss_scale is not None:
            # First of all: norms, clipping and the optimizers are to see what they would see without it.
            loss_scale.unscale(self.gradients.parameters)
        if agreement is not None and scales:
            self._scale(agreement)

    def change(self, step: int, agreement: Agreement, update: Callable[[], None]) -> None:
        """Everything that a step changes; `update` changes the parameters."""
        replica, optimizers = self.replica, self.replica.optimizers
        runs_user_code = optimizers.run_user_code
        if runs_user_code:
            # Noise, which is then the same in every worker.
            replica.device.seed(derive_seed(self.spec.seed, "apply", step))
        if optimizers.are_scheduled_by_job:
            optimizers.prepare(step, self.sampler)
        if runs_user_code:
            self._tidy()
        if agreement.buffers:
            # Before the step, which may change buffers too: an average is made of the statistics of this step.
            replica.buffers.commit(agreement.buffers)
        update()
        if optimizers.schedulers:
            optimizers.advance_schedules(step, self.sampler)
        if runs_user_code:
            self._take_changes("optimizer.step() or schedule().step()" if optimizers.schedulers else "optimizer.step()")
        if replica.average is not None:
            replica.average.update()

    def react(self, metric: float) -> None:
        self._tidy()
        self.replica.optimizers.react(metric)
        self._take_changes("schedule().step()")

    def _tidy(self) -> None:
        """What user code sees in an update must not depend on which lanes and batches this worker hosts."""
        self.replica.begin_lane()
        self.watch.put_back()

    def _take_changes(self, where: str) -> None:
        """What user code changes in the model belongs to the state, and is the same in every worker."""
        self.replica.buffers.adopt()
        self.watch.after_update(where)

    def leave_out(self, step: int) -> None:
        """A step that is void: no parameter, buffer, optimizer or schedule is touched, except one that counts epochs.

        What lanes have left in the model's buffers was never committed: whoever uses the model next restores them.
        """
        for parameter in self.gradients.parameters:
            # What user code finds here afterwards must not depend on which lanes this worker hosts.
            parameter.grad = None
        optimizers = self.replica.optimizers
        if optimizers.end_epoch(step, self.sampler):
            self.replica.device.seed(derive_seed(self.spec.seed, "apply", step))
            self._tidy()
            optimizers.leave_out()
            optimizers.advance_schedules(step, self.sampler)
            self._take_changes("schedule().step()")

    def parameters_of(self, name: str) -> list[torch.Tensor]:
        """What one optimizer updates."""
        if name == SOLE:
            return list(self.gradients.parameters)
        return self.replica.optimizers.parameters(name)

    def _scale(self, agreement: Agreement) -> None:
        """Make each gradient that of the mean over what was read: only now it is known how much that is."""
        for name, loss in agreement.losses.items():
            gradients = [p.grad for p in self.parameters_of(name) if p.grad is not None]
            if loss.per_item and gradients:
                torch._foreach_div_(gradients, loss.count)
            elif agreement.bad and gradients:
                torch._foreach_mul_(gradients, agreement.planned / agreement.samples)

    def _norms(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        clip = self.spec.clip_norm
        return {name: self.gradients.clipped_norm(self.parameters_of(name), clip) for name in names}
