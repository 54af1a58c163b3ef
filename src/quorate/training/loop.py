"""The loop: step, evaluate, save, until the job is done or asked to stop."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from quorate.core.cursor import Phase
from quorate.core.phases import APPLY, CHECKPOINT, COMPUTE, DATA, EVALUATION, EXCHANGE
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Batch, Feed
from quorate.data.indices import joined
from quorate.data.ledger import Tally
from quorate.data.ranges import ranges_of
from quorate.data.reading import EvaluationPlan, Request, Source
from quorate.data.sample_order import SampleOrder
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, RunBegan, SkippedStep, StepCompleted, TrainingBlocks
from quorate.spec.job import JobSpec
from quorate.training.activity import Activity
from quorate.training.evaluation import Evaluated, Evaluator
from quorate.training.lane import LaneResult, LaneRunner
from quorate.training.left_out import Telling, nothing_to_train_on, worth_telling
from quorate.training.progress import Progress, metric_of
from quorate.training.replica import Replica
from quorate.training.run_mode import RunMode
from quorate.training.saver import Saver
from quorate.training.state_watch import StateWatch, news, warn_of
from quorate.training.strategy import (
    BEGIN_AND_BREAK,
    BOUNDARIES,
    BREAK,
    SAVE,
    SAVE_AND_BREAK,
    Agreement,
    Strategy,
)
from quorate.training.update import Update

log = logging.getLogger(__name__)

MOST_RANGES = 1_000
"""So many ranges of bad samples are listed of an evaluation: an event that is too large would not arrive at all."""


@dataclass
class Loop:
    """Everything that a worker trains with; `run` reads as the list of what it does."""

    spec: JobSpec
    sampler: SampleOrder
    evaluation: EvaluationPlan
    replica: Replica
    feed: Feed
    lanes: LaneRunner
    watch: StateWatch
    strategy: Strategy
    update: Update
    evaluator: Evaluator
    saver: Saver
    activity: Activity
    progress: Progress
    publish: Callable[[Event], None]
    check_lease: Callable[[], None]
    stop_requested: Callable[[], str | None]
    break_requested: Callable[[], bool]
    save_requested: Callable[[], bool]
    save_asked: Callable[[], bool]
    save_begun: Callable[[], None]
    workers: int = 1
    mode: RunMode = field(default_factory=RunMode)
    _step_ended: float = field(default_factory=perf_counter)
    _is_warm: bool = False
    _bad_listed: tuple[int, ...] = ()
    _notes: list[str] = field(default_factory=list)
    _draws: bool = False

    def run(self) -> str:
        """Do what it is here for; "complete", "early stop", why it was asked to stop, or BREAK."""
        if self.mode.evaluates_only:
            self._evaluate_only()
            return "complete"
        self._publish_begin()
        self.saver.enter(self.strategy, self.progress.cursor.step)
        self._evaluate_if_due()
        # Where a generation was lost while it saved, the next one saves; what is saved already stays as it is.
        if self._save_is_due():
            self._begin_save()
        while not self._is_over():
            wish = self._step()
            if wish is not None and wish not in BOUNDARIES:
                self._save()
                return wish
            self._evaluate_if_due()
            if wish == SAVE_AND_BREAK:
                self._save()
            elif wish in (SAVE, BEGIN_AND_BREAK) or self._save_is_due():
                self._begin_save()
            if wish not in (None, SAVE):
                return BREAK
        self._save()
        return "early stop" if self.progress.early_stopped else "complete"

    @property
    def is_saved(self) -> bool:
        """Whether this worker has written a checkpoint of where it stands."""
        return self.saver.has_written(self.progress)

    def close(self) -> None:
        """Let go of loaders, neighbours and parameters; what was trained stays."""
        self.saver.leave()
        self.feed.close()
        self.strategy.close()

    def _is_over(self) -> bool:
        step = self.progress.cursor.step
        return self.progress.early_stopped or step >= self.sampler.total_steps or self.mode.ends_at(step)

    def _step(self) -> str | None:
        step = self.progress.cursor.step + 1
        self.activity.begin_step(step)
        self.strategy.begin(step)
        batch_samples = self.sampler.batch_samples(step)
        results = [self._run_lane(step, lane, batch_samples) for lane in self.strategy.hosted]
        self.replica.check_trainable()
        self.watch.after_lanes()
        with self.activity.during(EXCHANGE):
            agreement = self.strategy.exchange(step, results, self._wish())
        self._settle_save()
        self.check_lease()
        with self.activity.during(APPLY):
            norms = self.update.leave_out() if agreement.is_void else self.update.apply(step, agreement)
        self._tell_times()
        before, bad = self.progress, len(agreement.bad)
        if agreement.is_void:
            self.progress = before.after_step(0, bad=bad, is_barren=not agreement.samples)
        else:
            self.progress = before.after_step(agreement.samples, agreement.tally, bad=bad)
        warnings = self._warned(Source.TRAINING, agreement) if bad else []
        warnings += self._named(agreement.put_back)
        self._publish_step(step, agreement, norms, warnings + self._noted())
        self._check_fed(agreement)
        return agreement.stop

    def _warned(self, source: Source, found: Agreement | Evaluated) -> list[str]:
        """Say what is wrong with bad samples, here and to whoever follows the job; each thing once in a run."""
        telling = Telling(source, self.progress.told)
        warnings = telling.sentences(found.bad, found.why)
        if warnings:
            self.progress = replace(self.progress, told=telling.told)
        for warning in warnings:
            log.warning("%s", warning)
        return warnings

    def _named(self, put_back: Sequence[str]) -> list[str]:
        """Name what user code has assigned and what was put back; each once in a run."""
        warnings, told = warn_of(put_back, self.progress.told)
        if warnings:
            self.progress = replace(self.progress, told=told)
        for warning in warnings:
            log.warning("%s", warning)
        return warnings

    def _noted(self) -> list[str]:
        """What else this worker has met with in reading; its log has it already."""
        notes, self._notes = self._notes, []
        return notes

    def _check_fed(self, agreement: Agreement) -> None:
        """End a job that has read a whole epoch, or all that it reads, in vain: it would come to its end untrained."""
        if self.progress.barren >= min(self.sampler.steps_per_epoch, self.sampler.total_steps):
            raise nothing_to_train_on(self.progress.barren, agreement.why)

    def _tell_times(self) -> None:
        """Not of the first step, which waits for loaders that have just been started."""
        if self._is_warm:
            self.activity.end_step(len(self.strategy.hosted))
        else:
            # Now that the optimizers have their state, it is known how much there is to save.
            self.saver.prepare(self.replica, self.workers)
        self._is_warm = True

    def _wish(self) -> str | None:
        """What this worker has been asked to do at the end of the step; all do it, or none."""
        if reason := self.stop_requested():
            return reason
        if self.save_requested():
            return SAVE_AND_BREAK
        wants_save = self.save_asked() or self.saver.is_wanted(by_time=0 in self.strategy.hosted)
        if self.break_requested():
            return BEGIN_AND_BREAK if wants_save else BREAK
        return SAVE if wants_save else None

    def _run_lane(self, step: int, lane: int, batch_samples: int) -> LaneResult:
        epoch = self.sampler.epoch_of(step)
        waited = self.activity.seconds[DATA]
        self.check_lease()
        with self.activity.during(DATA, lane):
            planned = self.sampler.micro_batches(step, lane)
            # Before the first is read: if that kills the worker, somebody can tell which they were.
            self.activity.reads(epoch, joined(planned))
            answers = [self.feed.next(Request(Source.TRAINING, epoch, samples, lane)) for samples in planned]
        waited = self.activity.seconds[DATA] - waited
        with self.activity.during(COMPUTE, lane):
            batches = [(len(batch.samples), batch.content) for batch in answers if not batch.is_empty]
            result = self.lanes.run(step, lane, batches, batch_samples)
            # What the feed has answered with; a ledger of what was planned proves nothing.
            result.read = joined([batch.samples for batch in answers])
            result.tally, result.data_s = Tally.of(epoch, result.read), waited
        result.put_back = news(result.put_back, self.progress.told)
        self._notes += [note for batch in answers for note in batch.notes]
        self._draws = self._draws or any(batch.draws for batch in answers)
        if any(batch.bad for batch in answers):
            self._tell_bad(result, answers)
        return result

    def _tell_bad(self, result: LaneResult, answers: Sequence[Batch]) -> None:
        left_out = LeftOut()
        for batch in answers:
            left_out.extend(batch.bad, batch.why)
        result.bad = left_out.indices
        result.why = worth_telling(self.progress.told, left_out.reasons, has_samples=len(result.read) > 0)

    def _evaluate_if_due(self) -> None:
        cursor = self.progress.cursor
        if cursor.phase is Phase.EVALUATED or not self.evaluation.is_due(cursor.step, self.sampler):
            return
        evaluated = self._evaluate(cursor.step)
        metrics, before = evaluated.metrics, self.progress
        has_effects = self.evaluation.has_effects(cursor.step, self.sampler)
        early_stop = self.spec.early_stop if has_effects else None
        self.progress = before.after_evaluation(metrics, self.spec.evaluate, early_stop, len(evaluated.bad))
        if has_effects and self.replica.optimizers.reacts:
            self.update.react(metric_of(metrics, self.spec.evaluate.metric or "loss", "evaluate.metric"))
        self._publish_evaluation(evaluated, before)

    def _evaluate_only(self) -> None:
        before = self.progress
        evaluated = self._evaluate(before.cursor.step)
        self.progress = replace(before, metrics=evaluated.metrics, bad_evaluated=len(evaluated.bad))
        self._publish_evaluation(evaluated, before)

    def _evaluate(self, step: int) -> Evaluated:
        self._settle_save()  # averages are evaluated in the place of the parameters
        with self.activity.during(EVALUATION):
            return self.evaluator.run(step, self.strategy)

    def _save_is_due(self) -> bool:
        """A fact of the state and the job, so all workers find the same without a word."""
        step, every = self.progress.cursor.step, self.spec.checkpoint.every
        if every == "epoch":
            is_due = step > 0 and self.sampler.ends_epoch(step)
        else:
            is_due = every is not None and step > 0 and step % every == 0
        return self.mode.saves_at(step, is_due=is_due or self.progress.is_best)

    def _begin_save(self) -> None:
        with self.activity.during(CHECKPOINT):
            self.watch.check("loss() or metrics()", whole=True)
            self.save_begun()
            self.saver.begin(self.replica, self.progress, self.strategy)

    def _settle_save(self) -> None:
        """The copy of a state that is being saved must be whole before the state changes."""
        if not self.saver.is_settled:
            with self.activity.during(CHECKPOINT):
                self.saver.settle()

    def _save(self) -> None:
        with self.activity.during(CHECKPOINT):
            self.watch.check("loss() or metrics()", whole=True)
            self.save_begun()
            self.saver.save(self.replica, self.progress, self.strategy)

    def _publish_begin(self) -> None:
        event = RunBegan(
            from_step=self.progress.cursor.step,
            total_steps=self.sampler.total_steps,
            steps_per_epoch=self.sampler.steps_per_epoch,
            epoch_length=self.sampler.epoch_length,
            dataset_samples=self.sampler.samples,
            lanes=self.spec.lanes,
            data=TrainingBlocks.of(self.sampler.describe()),
        )
        self.publish(event)

    def _publish_evaluation(self, evaluated: Evaluated, before: Progress) -> None:
        # An evaluation leaves out the same ones as the last.
        listed = ranges_of(evaluated.bad)[:MOST_RANGES] if evaluated.bad != self._bad_listed else ()
        warnings = self._warned(Source.VALIDATION, evaluated) if evaluated.bad else []
        warnings += self._named(evaluated.put_back)
        self._notes += evaluated.notes
        event = EvaluationDone(
            step=self.progress.cursor.step,
            metrics=evaluated.metrics,
            best=self.progress.best is not before.best,
            bad_samples=len(evaluated.bad),
            bad=listed,
            warnings=(*warnings, *self._noted()),
        )
        self._bad_listed = evaluated.bad
        self.publish(event)

    def _publish_step(self, step: int, agreement: Agreement, norms: dict[str, float], warnings: list[str]) -> None:
        now = perf_counter()
        elapsed, self._step_ended = now - self._step_ended, now
        seconds = self.activity.seconds
        skipped = agreement.skipped
        is_own, dropped, planned = self._ledger_of_epoch(step)
        event = StepCompleted(
            step=step,
            epoch=self.sampler.epoch_of(step),
            losses=self._losses(agreement),
            learning_rates=self.replica.optimizers.learning_rates,
            gradient_norms=norms,
            samples=agreement.samples,
            samples_per_second=agreement.samples / elapsed,
            data_s=seconds[DATA],
            compute_s=seconds[COMPUTE],
            exchange_s=seconds[EXCHANGE],
            apply_s=seconds[APPLY],
            ledger=str(agreement.tally),
            own_order=is_own,
            dropped=dropped,
            planned=planned,
            # Of another worker, for which this one has waited in the exchange.
            longest_data_s=agreement.data_s if agreement.data_s > seconds[DATA] + 1e-6 else None,
            draws=self._draws,  # what is decoded is another sample in each epoch, and cannot be cached
            log=agreement.log or None,
            # All of them, however many: the ledger adds up what was left out with what was used.
            bad_samples=len(agreement.bad),
            bad=ranges_of(agreement.bad) if agreement.bad else (),
            warnings=tuple(warnings),
            skipped=None if skipped is None else SkippedStep(tuple(skipped.lanes), tuple(skipped.samples)),
        )
        self.publish(event)

    def _losses(self, agreement: Agreement) -> dict[str, float | None]:
        """The mean of each; a step that changes nothing has none."""
        if agreement.is_void:
            return dict.fromkeys(self.replica.optimizers.by_name)
        return {name: loss.mean for name, loss in agreement.losses.items()}

    def _ledger_of_epoch(self, step: int) -> tuple[bool, tuple[int, ...], str | None]:
        """What the ledger must know of a step's epoch: whether the task orders it, and in the end what was left out."""
        epoch = self.sampler.epoch_of(step)
        is_own = self.sampler.is_own(epoch)
        if not self.sampler.ends_epoch(step):
            return is_own, (), None
        dropped = tuple(sorted(self.sampler.dropped(epoch).tolist()))
        return is_own, dropped, str(self.sampler.planned(epoch)) if is_own else None
