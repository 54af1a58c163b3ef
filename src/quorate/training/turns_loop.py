"""The loop of a generation where `main` has a loop of its own."""

from dataclasses import dataclass, field
from typing import Any

from quorate.core.cached import cached_property
from quorate.core.errors import LanesDiffer, ReplicasDiffer, SettingsDiffer, UnsupportedModelError
from quorate.core.worker_status import TURN
from quorate.observe.events import LogMessage, StepCompleted
from quorate.training.loop import Loop
from quorate.training.own_loop import OwnLoop
from quorate.training.own_rehearsal import Rehearsals
from quorate.training.progress import Evaluated
from quorate.training.strategy import StepRequest


@dataclass
class TurnsLoop(Loop):
    """The loop where it takes turns with `main`, which gets the result of a step before anything follows from it."""

    main: OwnLoop = field(kw_only=True)
    may_lag: bool = False

    @cached_property
    def _rehearsals(self) -> Rehearsals:
        return Rehearsals(self.main, self.watch, self.sampler)

    def _train(self) -> str | None:
        self.progress = self.main.enter(self.progress, self.sampler, self.strategy.hosted, self.watch)
        ending = super()._train()
        if ending in ("complete", "early stop"):
            self._rehearsals.end()
            if self.mode.replayed_step is None:
                self.main.finish()
        return ending

    def close(self) -> None:
        try:
            self._rehearsals.end()
        finally:
            super().close()

    def _try_step(self) -> StepRequest | None:
        if message := self._rehearsals.begin_step(self.progress):
            self.publish(LogMessage(step=self.progress.cursor.step, level="warning", message=message))
        try:
            return super()._try_step()
        except ReplicasDiffer as error:
            buffers = (name for name, _ in self.replica.buffers.committed())
            is_of_buffers = any(f"'{name}'" in error.message for name in buffers)
            if isinstance(error, LanesDiffer) or not (isinstance(error, SettingsDiffer) or is_of_buffers):
                raise
            raise UnsupportedModelError(
                f"{error} So {type(self.main).__name__}() does not do the same in every worker between two steps. Keep "
                "what it depends on in run.state, use result.loss rather than the loss of a batch, and set nothing "
                "under run.is_main."
            ) from None

    def _complete(self, *args: Any, **named: Any) -> StepCompleted:
        told = super()._complete(*args, **named)
        # What one worker raises now, as under run.is_main, is its user's, and no sign of a replica that differs.
        self.activity.phase = TURN
        self.progress = self._rehearsals.after_step(self.progress, told)
        return told

    def _evaluate(self, step: int) -> Evaluated:
        with self.main.evaluating():
            return super()._evaluate(step)

    def _evaluate_if_due(self) -> None:
        super()._evaluate_if_due()
        self.activity.phase = TURN
        self.progress = self._rehearsals.after_evaluation(self.progress)
