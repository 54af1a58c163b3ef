"""The loop: step, evaluate, save, until the job is done or asked to stop."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from quorate.core.generation import Phase
from quorate.core.worker_status import APPLY, CHECKPOINT, COMPUTE, DATA, EVALUATION, EXCHANGE
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Feed
from quorate.data.indices import joined, ranges_of
from quorate.data.ledger import Tally
from quorate.data.sampler import EvaluationPlan, Request, Sampler, Source
from quorate.data.samples import Batch
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, RunBegan, SkippedStep, StepCompleted, TrainingBlocks
from quorate.spec.job import JobSpec
from quorate.training.activity import Activity
from quorate.training.checkpointer import Checkpointer
from quorate.training.evaluation import Evaluated, Evaluator
from quorate.training.lane import LaneResult, LaneRunner
from quorate.training.progress import BadSampleReport, Progress, metric_of, nothing_to_train_on, worth_telling
from quorate.training.replica import Replica
from quorate.training.run_mode import RunMode
from quorate.training.state_watch import StateWatch, news, warn_of
from quorate.training.strategy import Agreement, Save, StepRequest, Strategy
from quorate.training.update import Update

log = logging.getLogger(__name__)

MOST_RANGES = 1_000
"""So many ranges of bad samples are listed of an evaluation: an event that is too large would not arrive at all."""


@dataclass
class Loop:
    """Everything that a worker trains with; `run` reads as the list of what it does."""

    spec: JobSpec
    sampler: Sampler
    evaluation: EvaluationPlan
    replica: Replica
    feed: Feed
    lanes: LaneRunner
    watch: StateWatch
    strategy: Strategy
    update: Update
    evaluator: Evaluator
    saver: Checkpointer
    activity: Activity
    progress: Progress
    publish: Callable[[Event], None]
    check_lease: Callable[[], None]
    requested: Callable[[], StepRequest]
    settle_save: Callable[[], None]
    save_begun: Callable[[], None]
    workers: int = 1
    mode: RunMode = field(default_factory=RunMode)
    _step_ended: float = field(default_factory=perf_counter)
    _is_warm: bool = False
    _bad_listed: tuple[int, ...] = ()
    _notes: list[str] = field(default_factory=list)
    _draws: bool = False

    def run(self) -> str | None:
        """Do what it is here for; "complete", "early stop" or why it was asked to stop; None where the generation ends
        at a step boundary and the job goes on in the next."""
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
            request = self._step()
            if request.stop is not None:
                self._save()
                return request.stop
            self._evaluate_if_due()
            if request.save is Save.COMMIT:
                self._save()
            elif request.save is Save.BEGIN or self._save_is_due():
                self._begin_save()
            if request.leave:
                return None
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

    def _step(self) -> StepRequest:
        step = self.progress.cursor.step + 1
        self.activity.begin_step(step)
        self.strategy.begin(step)
        batch_samples = self.sampler.batch_samples(step)
        results = [self._run_lane(step, lane, batch_samples) for lane in self.strategy.hosted]
        self.replica.check_trainable()
        self.watch.after_lanes()
        outcome = self.strategy.advance(step, results, self._request())
        self._report_times()
        agreed, before = outcome.agreed, self.progress
        bad = len(agreed.bad)
        if agreed.is_void:
            self.progress = before.after_step(0, bad=bad, is_barren=not agreed.samples)
        else:
            self.progress = before.after_step(agreed.samples, agreed.tally, bad=bad)
        self._publish_step(step, agreed, outcome.norms, self._warnings(Source.TRAINING, agreed))
        if self.progress.barren >= min(self.sampler.steps_per_epoch, self.sampler.total_steps):
            # A whole epoch, or all that it reads, was read in vain: it would come to its end untrained.
            raise nothing_to_train_on(self.progress.barren, agreed.why)
        return agreed.request

    def _warnings(self, source: Source, found: Agreement | Evaluated) -> list[str]:
        """What is wrong with bad samples, and what user code has assigned: each thing once in a run. And what else this
        worker has met with in reading, which its log has already."""
        warnings: list[str] = []
        told = self.progress.told
        if found.bad:
            report = BadSampleReport(source, told)
            warnings = report.sentences(found.bad, found.why)
            told = report.told
        if found.put_back:
            named, told = warn_of(found.put_back, told)
            warnings += named
        if warnings:
            self.progress = replace(self.progress, told=told)
        for warning in warnings:
            log.warning("%s", warning)
        notes, self._notes = self._notes, []
        return warnings + notes

    def _report_times(self) -> None:
        """Not of the first step, which waits for loaders that have just been started."""
        if self._is_warm:
            self.activity.end_step(len(self.strategy.hosted))
        else:
            # Now that the optimizers have their state, it is known how much there is to save.
            self.saver.prepare(self.progress, self.workers)
        self._is_warm = True

    def _request(self) -> StepRequest:
        """What this worker is asked to do at the end of the step, and the save that its clock asks for."""
        request = self.requested()
        if request.save is Save.NONE and self.saver.is_wanted(by_time=0 in self.strategy.hosted):
            return replace(request, save=Save.BEGIN)
        return request

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
            self._describe_bad(result, answers)
        return result

    def _describe_bad(self, result: LaneResult, answers: Sequence[Batch]) -> None:
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
        self.settle_save()  # averages are evaluated in the place of the parameters
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
            self.saver.begin(self.progress, self.strategy)

    def _save(self) -> None:
        with self.activity.during(CHECKPOINT):
            self.watch.check("loss() or metrics()", whole=True)
            self.save_begun()
            self.saver.save(self.progress, self.strategy)

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
        self._notes += evaluated.notes
        event = EvaluationDone(
            step=self.progress.cursor.step,
            metrics=evaluated.metrics,
            best=self.progress.best is not before.best,
            bad_samples=len(evaluated.bad),
            bad=listed,
            warnings=tuple(self._warnings(Source.VALIDATION, evaluated)),
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
