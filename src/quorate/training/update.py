"""From the agreed gradient to new weights: the same kernels on the same bits in every worker."""

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from quorate.core.seeds import derive_seed
from quorate.data.streams import seed_generators
from quorate.spec.job import JobSpec
from quorate.training.gradients import Gradients
from quorate.training.optimizers import SOLE
from quorate.training.replica import Replica
from quorate.training.strategy import Agreement


class Update:
    """Applies a step's agreement to the replica."""

    def __init__(self, spec: JobSpec, replica: Replica, gradients: Gradients, total_steps: int) -> None:
        self._spec = spec
        self._replica = replica
        self._gradients = gradients
        self._total_steps = total_steps

    def apply(self, step: int, agreement: Agreement) -> dict[str, float]:
        """Update parameters and buffers; the norm of each optimizer's gradient, before clipping."""
        optimizers = self._replica.optimizers
        # An optimizer may draw noise; it is the same in every worker.
        seed_generators(derive_seed(self._spec.seed, "apply", step))
        self._gradients.install(agreement.present)
        self._divide(agreement)
        norms = {name: self._clip(self._parameters(name)) for name in optimizers.by_name}
        optimizers.prepare(step, self._total_steps)
        optimizers.step()
        self._replica.buffers.commit(agreement.buffers)
        return norms

    def _parameters(self, name: str) -> list[torch.Tensor]:
        if name == SOLE:
            return list(self._gradients.parameters)
        return self._replica.optimizers.parameters(name)

    def _divide(self, agreement: Agreement) -> None:
        for name, loss in agreement.losses.items():
            gradients = [p.grad for p in self._parameters(name) if p.grad is not None]
            if loss.per_item and gradients:
                torch._foreach_div_(gradients, loss.count)

    def _clip(self, parameters: list[torch.Tensor]) -> float:
        if self._spec.clip_norm is not None:
            return clip_grad_norm_(parameters, self._spec.clip_norm).item()
        return get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
