"""The loop of a worker that trains alone on a device: it begins steps before it has read those before them, so that the
device never waits for the host. They are completed in order, some steps later."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from quorate.core.generation import CHECKPOINT, COMPUTE
from quorate.training.activity import Timing
from quorate.training.lane import LaneResult
from quorate.training.loop import Loop
from quorate.training.save import Draft
from quorate.training.strategy import NOTHING_ASKED, Lag, PendingStep, Save, StepRequest

MOST_AHEAD = 8
"""So many steps may have been begun on a device of which the host has read nothing yet."""
_ONLY_A_SAVE = (NOTHING_ASKED, replace(NOTHING_ASKED, save=Save.BEGIN))


@dataclass
class LateLoop(Loop):
    """The model is ahead of `progress` by the steps that are `_begun`: nothing that looks at the one by the other may
    happen before they are completed. `lag` agrees on steps and updates on the device."""

    lag: Lag = field(kw_only=True)
    _begun: deque[tuple[int, PendingStep, dict[str, float]]] = field(default_factory=deque)
    _draft: tuple[int, Draft] | None = None

    def _train(self) -> str | None:
        try:
            return super()._train()
        except BaseException:
            # What was done before it is told before it; if something was wrong with that, this is what matters.
            self._complete_all()
            raise

    def _next(self) -> StepRequest:
        """Steps until something follows from one: all are complete then."""
        step = self.progress.cursor.step + 1
        while True:
            while (request := self._step(step)) is None:
                pass
            if not self._begun:
                return request
            if not self._may_stay_ahead(step, request):
                self._complete_all()
                return request
            step += 1

    def _advance(self, step: int, results: Sequence[LaneResult]) -> StepRequest | None:
        """Have the device do the rest of a step, which is read some steps later. The first, which makes what the
        optimizers keep, is read at once, and so is an audit: all before it are complete then."""
        is_audited = self.audit is not None and step >= self.audit.due
        if is_audited or not self._is_warm or not self.lag.can_take(results):
            self._complete_all()
            return super()._advance(step, results)
        self._hosted.notes += self.memory.notes()
        self.watch.after_lanes()
        request = self._wishes()
        self._begun.append((step, self.lag.begin(step, results, request), self.activity.seconds))
        self._complete_arrived(MOST_AHEAD)
        self.activity.add_step(self.activity.seconds, len(self.strategy.hosted))
        self.watch.settings.begin()
        return request

    def _may_stay_ahead(self, step: int, request: StepRequest) -> bool:
        """Whether the next step may begin before this one, the last that was begun, is complete.

        Nothing may follow from it but a save, of which the device makes the copy: it is begun when that step is read.
        """
        is_evaluated = self.evaluation.is_due(step, self.sampler)
        if request not in _ONLY_A_SAVE or is_evaluated or step >= self._last:
            return False
        if request == NOTHING_ASKED and not self._saves_at(step):
            return True
        # A replay needs the state before its step, and of one that is left out no draft is saved.
        if self._draft is not None or self.mode.replayed_step is not None:
            return False
        with self.activity.during(CHECKPOINT):
            draft = self.checkpointer.draft(self.progress)
        self._draft = None if draft is None else (step, draft)
        return draft is not None

    def _complete_all(self) -> None:
        """Before an evaluation, a save or the end, before a step that is read at once, and on every way out."""
        if self._begun:
            place = self.activity.phase, self.activity.lane
            self._complete_arrived(0)
            self.activity.phase, self.activity.lane = place  # which a report of trouble names

    def _complete_arrived(self, most: int) -> None:
        """Those whose numbers are there; the first is waited for while there are more than `most`."""
        while self._begun:
            arrived = sum(1 for _ in takewhile(lambda begun: begun[1].arriving.is_there(), self._begun))
            if not arrived:
                if len(self._begun) <= most:
                    return
                self.activity.enter(COMPUTE)
                self._begun[0][1].arriving()
                self.activity.leave()
                arrived = 1
            elapsed = self._laps.lap(arrived)
            for _ in range(arrived):
                self._complete_first(elapsed)

    def _complete_first(self, elapsed: float) -> None:
        step, pending, seconds = self._begun[0]
        try:
            agreed = pending.finish()
        except BaseException:
            # What was begun after it is not told, and not saved.
            self._begun.clear()
            self.activity.step, self.activity.lane = step, None
            raise
        self._begun.popleft()
        self._complete(step, agreed, Timing(elapsed, seconds))
        self.watch.settings.begin()  # the rate of an update that turned out to be none was put back
        if self._draft is None or self._draft[0] != step:
            return
        (_, draft), self._draft = self._draft, None
        if agreed.is_void:
            # The host has prepared for an update that was none, and the draft has that.
            self.checkpointer.put_off()
        else:
            self._begin_save(draft)
