"""The state of a job whose lanes hold back what compression leaves of their gradients."""

from dataclasses import dataclass, replace

from quorate.checkpoint.tree import Encoded
from quorate.strategies.compression.residuals import LANES, Residuals
from quorate.training.progress import Progress
from quorate.training.state_layout import HeldState, Parts, Replicated, shared_out


@dataclass(frozen=True)
class WithResiduals(Replicated):
    """Besides what every member holds, each has what its lanes have held back: whoever hosts a lane writes that."""

    residuals: Residuals

    def state(self, progress: Progress) -> HeldState:
        held, of_lanes = super().state(progress), self.residuals.state()
        skeleton = {"dict": held.encoded.skeleton["dict"] | {LANES: of_lanes.skeleton}}
        encoded = Encoded(skeleton, held.encoded.tensors | of_lanes.tensors)
        return replace(held, encoded=encoded, of_lanes=frozenset(of_lanes.tensors))

    def parts(self, held: HeldState, writers: int) -> Parts:
        if not self.residuals.applied:
            return super().parts(held, writers)
        return shared_out(held.common.tensors, self.residuals.names_by_host(writers))

    def load(self, encoded: Encoded) -> Progress:
        fields = dict(encoded.skeleton["dict"])
        self.residuals.load(fields.pop(LANES, None), encoded.tensors)
        return super().load(Encoded({"dict": fields}, encoded.tensors))
