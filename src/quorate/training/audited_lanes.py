"""The lanes that a worker hosts, and before them those of others that it audits."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from quorate.core.worker_status import COMPUTE, DATA
from quorate.data.samples import Batch
from quorate.training.audit import LaneAudit, Outcome
from quorate.training.device import digests
from quorate.training.hosted_lanes import HostedLanes
from quorate.training.lane import LaneResult
from quorate.training.progress import Progress

Read = Callable[[], list[Batch]]


class AuditedLanes(HostedLanes):
    """Hosted lanes of which some are audited, and which are computed after those that this worker audits.

    Where memory runs out in an audit, nothing is compared: the step goes on without it.
    """

    def __init__(self, audit: LaneAudit, *rest: Any) -> None:
        super().__init__(*rest)
        self.audit = audit

    def run(self, step: int, epoch: int, batch_samples: int, progress: Progress, last: int) -> list[LaneResult]:
        audit, changes = self.audit, progress.micro_batches
        for lane in audit.lanes(step):
            read = partial(self.reader.read, step, lane, changes, aside=True)
            following = partial(self.reader.read_ahead, step, lane, last, changes, aside=True)
            audit.see(lane, self._outcome(self._run_aside(step, lane, batch_samples, read, following)))

        def again(lane: int) -> Outcome | None:
            read = partial(self.reader.read_again, step, lane, changes)
            return self._outcome(self._run_aside(step, lane, batch_samples, read, by_tensor=True))

        audit.compute = again
        return super().run(step, epoch, batch_samples, progress, last)

    def run_lane(
        self, step: int, epoch: int, lane: int, batch_samples: int, progress: Progress, last: int
    ) -> LaneResult:
        result = super().run_lane(step, epoch, lane, batch_samples, progress, last)
        if lane in self.audit.owned(step):
            with suppress(torch.OutOfMemoryError):
                self._runner.digest(result)
        return result

    def _run_aside(
        self,
        step: int,
        lane: int,
        batch_samples: int,
        read: Read,
        following: Callable[[], None] = lambda: None,
        *,
        by_tensor: bool = False,
    ) -> LaneResult:
        """A lane in the place of a hosted one. What it has read, logged and assigned is told by its host."""
        slot, runner = self._lanes[0], self._runner
        self._check_lease()
        self._activity.enter(DATA, lane)
        batches = [(len(batch.samples), batch.content) for batch in read() if len(batch.samples)]
        self._activity.leave()
        if not batches:
            return LaneResult(lane, 0)

        def run() -> LaneResult:
            self._activity.enter(COMPUTE, lane)
            runner.put_back()  # or what was assigned before the step would look like a fault of this worker
            result = runner.run(step, lane, batches, batch_samples, meanwhile=following)
            with suppress(torch.OutOfMemoryError):  # a digest takes as much again as the gradient
                runner.digest(result, by_tensor=by_tensor)
            runner.read([result])
            self._activity.leave()
            return result

        with runner.aside(slot):
            return self._tried(run, slot, catches=runner.can_abandon)

    def _outcome(self, result: LaneResult) -> Outcome | None:
        if result.shortage or (result.samples and not result.digests):
            return None
        return Outcome.of(result, digests(result.buffers.items(), self._device), self._runner.tensors)
