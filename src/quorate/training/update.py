"""From the agreed gradient to new weights: the same kernels on the same bits in every worker."""

from collections.abc import Callable, Iterable

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from quorate.core.digests import derive_seed
from quorate.core.worker_status import APPLY
from quorate.spec.job import JobSpec
from quorate.training.activity import Activity
from quorate.training.flat_buffers import Taken
from quorate.training.gradients import Gradients
from quorate.training.optimizers import SOLE
from quorate.training.replica import Replica
from quorate.training.state_watch import StateWatch
from quorate.training.strategy import Agreement


class Update:
    """Applies a step's agreement to the replica.

    `before_change` is called before anything changes. It raises where this worker may not: its lease is over.
    """

    def __init__(
        self,
        spec: JobSpec,
        replica: Replica,
        gradients: Gradients,
        watch: StateWatch,
        total_steps: int,
        activity: Activity,
        before_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._replica = replica
        self._gradients = gradients
        self._watch = watch
        self._total_steps = total_steps
        self._activity = activity
        self._before_change = before_change

    def apply(self, step: int, agreement: Agreement) -> dict[str, float]:
        """Update parameters and buffers; the norm of each optimizer's gradient, before clipping."""
        self.begin()
        norms = self.leave_out() if agreement.is_void else self._apply(step, agreement)
        self._activity.leave()
        return norms

    def begin(self) -> None:
        """The state is about to change; the activity is left when it has. Raises where this worker may not."""
        self._before_change()
        self._activity.enter(APPLY)

    def _apply(self, step: int, agreement: Agreement) -> dict[str, float]:
        gradients, optimizers = self._gradients, self._replica.optimizers
        scales = self.install(agreement)
        if not scales and self._has_plain_norm:
            norms = {SOLE: gradients.total_norm(self._replica.device)}
        else:
            begun = self._norms(optimizers.by_name)
            norms = dict(zip(begun, self._replica.device.numbers(list(begun.values()))(), strict=True))
        self.change(step, agreement, optimizers.update)
        return norms

    @property
    def _has_plain_norm(self) -> bool:
        """Nothing depends on its last bits then, and whole buckets take a fraction of the time of many tensors."""
        return self._spec.clip_norm is None and list(self._replica.optimizers.by_name) == [SOLE]

    def apply_unless(self, void: torch.Tensor, step: int, present: int, buffers: Taken) -> dict[str, torch.Tensor]:
        """Begin the update on the device, where it leaves everything as it is if the step turns out to be `void`.

        For a step of which nothing has been read: the norms are still on the device, too. No code of the task may run
        in it (`Optimizers.can_leave_out`), and nobody averages the parameters.
        """
        self.begin()
        replica, optimizers = self._replica, self._replica.optimizers
        self._gradients.install(present, self._spec.clip_norm is not None)
        norms = {SOLE: self._gradients.norm()} if self._has_plain_norm else self._norms(optimizers.by_name)
        if self._spec.schedule is not None:
            optimizers.prepare(step, self._total_steps)
        if replica.buffers.flat is not None:
            replica.buffers.flat.commit_unless(void, buffers)
        optimizers.update_unless(void)
        self._activity.leave()
        return norms

    def install(self, agreement: Agreement) -> bool:
        """Put the sums where the optimizers look for them, as gradients of a mean; whether they had to be scaled."""
        scales = bool(agreement.bad) or any(loss.per_item for loss in agreement.losses.values())
        self._gradients.install(agreement.present, scales or self._spec.clip_norm is not None)
        if scales:
            self._scale(agreement)
        return scales

    def change(self, step: int, agreement: Agreement, update: Callable[[], None]) -> None:
        """Everything that a step changes; `update` changes the parameters."""
        replica, optimizers = self._replica, self._replica.optimizers
        runs_user_code = optimizers.run_user_code
        if runs_user_code:
            # Noise, which is then the same in every worker.
            replica.device.seed(derive_seed(self._spec.seed, "apply", step))
        if self._spec.schedule is not None:
            optimizers.prepare(step, self._total_steps)
        if runs_user_code:
            self._tidy()
        if agreement.buffers:
            # Before the step, which may change buffers too: an average is made of the statistics of this step.
            replica.buffers.commit(agreement.buffers)
        update()
        optimizers.advance_schedules()
        if runs_user_code:
            self._take_changes("optimizer.step() or schedule().step()" if optimizers.schedulers else "optimizer.step()")
        if replica.average is not None:
            replica.average.update()

    def react(self, metric: float) -> None:
        self._tidy()
        self._replica.optimizers.react(metric)
        self._take_changes("schedule().step()")

    def _tidy(self) -> None:
        """What user code sees in an update must not depend on which lanes and batches this worker hosts."""
        self._replica.begin_lane()
        self._watch.put_back()

    def _take_changes(self, where: str) -> None:
        """What user code changes in the model belongs to the state, and is the same in every worker."""
        self._replica.buffers.adopt()
        self._watch.after_update(where)

    def leave_out(self) -> dict[str, float]:
        """A step that is void: no parameter, buffer, optimizer or schedule is touched, and there is no norm.

        What lanes have left in the model's buffers was never committed: whoever uses the model next restores them.
        """
        for parameter in self._gradients.parameters:
            # What user code finds here afterwards must not depend on which lanes this worker hosts.
            parameter.grad = None
        return {}

    @property
    def optimizer_names(self) -> Iterable[str]:
        return self._replica.optimizers.by_name

    def parameters_of(self, name: str) -> list[torch.Tensor]:
        """What one optimizer updates."""
        if name == SOLE:
            return list(self._gradients.parameters)
        return self._replica.optimizers.parameters(name)

    def _scale(self, agreement: Agreement) -> None:
        """Make each gradient that of the mean over what was read: only now it is known how much that is."""
        for name, loss in agreement.losses.items():
            gradients = [p.grad for p in self.parameters_of(name) if p.grad is not None]
            if loss.per_item and gradients:
                torch._foreach_div_(gradients, loss.count)
            elif agreement.bad and gradients:
                torch._foreach_mul_(gradients, agreement.planned / agreement.samples)

    def _norms(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        clip, norms = self._spec.clip_norm, {}
        for name in names:
            parameters = self.parameters_of(name)
            if clip is not None:
                norms[name] = clip_grad_norm_(parameters, clip)
            else:
                norms[name] = get_total_norm([p.grad for p in parameters if p.grad is not None])
        return norms
