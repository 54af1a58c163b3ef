"""The loop: step, evaluate, save, until the job is done or asked to stop."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from quorate.core.cached import cached_property
from quorate.core.errors import QuorateError
from quorate.core.generation import CHECKPOINT, EVALUATION, Phase
from quorate.core.spans import PUBLISH
from quorate.data.feed import Feed
from quorate.data.indices import ranges_of
from quorate.data.sampler import PLANNED, EvaluationPlan, MicroBatchChanges, Sampler, Source, StepPlans
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, LogMessage, RunBegan, StepCompleted, TrainingBlocks
from quorate.replica.buffers import notice_of_few_samples
from quorate.replica.loss_scale import LEAST
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.spec.job import JobSpec
from quorate.task.progress import Evaluated, Progress, metric_of
from quorate.task.run_mode import MICRO_BATCH, RunMode
from quorate.task.task import notice_of_misspelt
from quorate.training.activity import Activity, Laps, Timing, Tracer
from quorate.training.audit import LaneAudit
from quorate.training.checkpointer import Checkpointer
from quorate.training.hosted_lanes import AheadReader, HostedLanes, LaneReader
from quorate.training.lane import LaneResult, LaneRunner
from quorate.training.memory_watch import MemoryWatch, memory_ran_out, more_micro_batches
from quorate.training.save import Draft
from quorate.training.strategy import (
    NOTHING_ASKED,
    Agreement,
    Save,
    Shortage,
    StepRequest,
    Strategy,
    advanced,
    step_completed,
)
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
    evaluate: Callable[[int, Strategy], Evaluated]
    checkpointer: Checkpointer
    activity: Activity
    progress: Progress
    memory: MemoryWatch
    publish: Callable[[Event], None]
    check_lease: Callable[[], None]
    requested: Callable[[], StepRequest]
    save_begun: Callable[[], None]
    keep_micro_batches: Callable[[MicroBatchChanges], None] = lambda _: None
    workers: int = 1
    tracer: Tracer | None = None
    mode: RunMode = field(default_factory=RunMode)
    audit: LaneAudit | None = None
    by_units: ClassVar[bool] = False
    _laps: Laps = field(default_factory=Laps)
    _is_warm: bool = False
    _bad_listed: tuple[int, ...] = ()
    _shortage: Shortage | None = None
    _last: int = 0
    _due: int = 0  # the next step after which it is asked whether something follows from it

    @cached_property
    def _hosted(self) -> HostedLanes:
        hosted, device, audit = self.strategy.hosted, self.replica.device, self.audit
        audited = (lambda _: ()) if audit is None else audit.lanes
        kind = LaneReader if device.is_host else AheadReader
        plans = StepPlans(self.sampler, hosted, self.progress.micro_batches)
        rest = self.activity, device, plans, self._last, audited
        reader = kind(self.feed, self.sampler, self.evaluation, hosted, *rest)
        return HostedLanes(self.spec, hosted, self.lanes, reader, self.activity, device, self.check_lease, self.audit)

    @staticmethod
    def publishes(strategy: Strategy, lanes: range) -> bool:  # noqa: ARG004
        """Whether the member with these lanes publishes steps; all pass through them, and the others keep them."""
        return 0 in lanes

    def run(self) -> str | None:
        """Do what it is here for; "complete", "early stop", "paused" or why it was asked to stop; None where the
        generation ends at a step boundary and the job goes on in the next."""
        if self.mode.evaluates_only:
            before = self.progress
            evaluated = self._evaluate(before.cursor.step)
            self.progress = replace(before, metrics=evaluated.metrics, bad_evaluated=len(evaluated.bad))
            self._publish_evaluation(evaluated, before)
            return "complete"
        if self.mode.batch_for:
            from quorate.training.batch_search import BatchSearch

            device, scale = self.replica.device, self.replica.loss_scale
            if scale is not None:
                scale.set(LEAST)  # a step that overflows takes no memory for the optimizers
            search = BatchSearch(self.spec, self.sampler, self.feed, self.lanes, self.strategy, device)
            self.progress = replace(self.progress, metrics={MICRO_BATCH: search.run(self.mode.batch_for)})
            return "complete"
        return self._train()

    def _train(self) -> str | None:
        self._publish_begin()
        self.checkpointer.enter(self.strategy, self.progress.cursor.step)
        last = self._last = self.mode.last_step(self.sampler.total_steps)
        self.watch.settings.begin()
        self._evaluate_if_due()
        # Where a generation was lost while it saved, the next one saves; what is saved already stays as it is.
        if self._save_is_due():
            self._begin_save()
        while self.progress.cursor.step < last and not self.progress.early_stopped:
            request = self._next()
            if request == NOTHING_ASKED and self.progress.cursor.step < self._due:
                continue  # as after most steps: nobody asks for anything, and the job wants nothing before `_due`
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
            self._due = self._next_due()
        self._save()
        return "early stop" if self.progress.early_stopped else self.mode.ending_after(last, self.sampler.total_steps)

    @property
    def is_saved(self) -> bool:
        return self.checkpointer.has_written(self.progress)

    @property
    def last_step_at(self) -> float:
        """When the last step was completed, by the performance counter; before the first, when the loop was made."""
        return self._laps.last

    def close(self) -> None:
        self.checkpointer.leave()
        self.feed.close()
        self.strategy.close()
        if self.audit is not None:
            # It refers to the loop, and such a circle would keep a generation's memory until somebody collects it.
            self.audit.compute = lambda _: None

    def _next(self) -> StepRequest:
        """The next step, and what all do after it."""
        step = self.progress.cursor.step + 1
        # Where memory runs out, all do the step again, in smaller pieces.
        while (request := self._step(step)) is None:
            pass
        return request

    def _step(self, step: int) -> StepRequest | None:
        """Lanes, exchange, update; None where memory ran out, and the step is to be done again."""
        strategy, activity = self.strategy, self.activity
        if self.tracer is not None:
            activity.spans = self.tracer.begin_step(step)
        activity.begin_step(step)
        strategy.begin(step)
        is_audited = self.audit is not None and step >= self.audit.due
        results = self._hosted.run(step, self.progress, is_audited=is_audited)
        return self._advance(step, results)

    def _wishes(self) -> StepRequest:
        """What this worker asks of all at the end of a step."""
        request = self.requested()
        if request.save is Save.NONE and self.checkpointer.is_wanted(by_time=0 in self.strategy.hosted):
            return replace(request, save=Save.BEGIN)
        return request

    def _advance(self, step: int, results: Sequence[LaneResult]) -> StepRequest | None:
        """From the lanes to the next state, with all others; None where memory ran out somewhere."""
        strategy, activity = self.strategy, self.activity
        if not self.replica.device.is_host:
            self._hosted.notes += self.memory.notes()
            self.lanes.read(results)
        self.watch.after_lanes()
        # A schedule of the task moves on at the end of the update, to the rates of the next step.
        optimizers = self.replica.optimizers
        rates = optimizers.learning_rates if optimizers.schedulers else None
        agreed = strategy.advance(step, results, self._wishes())
        spans = activity.spans
        began = 0.0 if spans is None else spans.clock()
        if agreed.shortage is not None:
            self._shrink(step, agreed.shortage)
            return None
        is_first, self._is_warm = not self._is_warm, True
        # The first step has waited for loaders that were just started, and does not count for the pace.
        if strategy.hosted and not is_first:
            activity.add_step(activity.seconds, len(strategy.hosted))
        self._complete(step, agreed._replace(learning_rates=rates))
        for event in agreed.told:
            self.publish(event)
        if is_first:  # now that the optimizers have their state, it is known how much there is to save
            self.checkpointer.prepare(self.progress, self.workers)
        if spans is not None:
            spans.add(PUBLISH, began, spans.root)
        self.watch.settings.begin()
        return agreed.request

    def _complete(self, step: int, agreed: Agreement, timing: Timing | None = None) -> StepCompleted:
        """A step is done: count it, and publish it."""
        self.progress = advanced(self.progress, agreed)
        if shrunk := [count for since, count in self.progress.micro_batches if since == step]:
            self.publish(memory_ran_out(self.spec, step, max(shrunk), self._shortage))
            self._shortage = None
        is_plain = not (agreed.bad or agreed.put_back or self._hosted.notes)
        warnings = () if is_plain else self._warnings(Source.TRAINING, agreed)
        timing = timing or Timing(self._laps.lap(), self.activity.seconds)
        optimizers = self.replica.optimizers
        rates = optimizers.learning_rates if agreed.learning_rates is None else agreed.learning_rates
        hosted, names = self._hosted, optimizers.by_name
        tensors = None if self.spec.record is None else [name for name, _ in self.replica.trainable]
        plan = hosted.reader.plans[step]
        event = step_completed(plan, agreed, warnings, timing, rates, self.sampler, names, hosted.draws, tensors)
        self.publish(event)
        barren = self.progress.barren
        if barren and barren >= min(self.sampler.steps_per_epoch, self.sampler.total_steps):
            # A whole epoch, or all that it reads, was read in vain: it would come to its end untrained.
            from quorate.training.told_once import nothing_to_train_on

            raise nothing_to_train_on(barren, agreed.why)
        return event

    def _warnings(self, source: Source, found: Agreement | Evaluated) -> tuple[str, ...]:
        """What is wrong with bad samples, and what user code has assigned: each thing once in a run. And what else this
        worker has met with in reading, which its log has already."""
        warnings: list[str] = []
        told = self.progress.told
        if found.bad:
            from quorate.training.told_once import of_samples

            warnings, told = of_samples(source, told, found.bad, found.why)
        if found.put_back:
            from quorate.training.told_once import of_names

            named, told = of_names(told, found.put_back)
            warnings += named
        if warnings:
            self.progress = replace(self.progress, told=told)
        for warning in warnings:
            log.warning("%s", warning)
        return (*warnings, *self._hosted.take_notes())

    def _shrink(self, step: int, shortage: Shortage) -> None:
        """Do a step again with more micro-batches, at the same cursor in every worker, and all after it."""
        count = more_micro_batches(self.spec, step, shortage)
        self.check_lease()  # whoever is cut off must not write down what the others, without it, never come to
        self.progress = self.progress.with_micro_batches(step, count)
        # Before anything is computed with it: whoever does this step again, from whichever checkpoint, does it alike.
        try:
            self.keep_micro_batches(self.progress.micro_batches)
        except QuorateError as error:  # checkpoints hold it, too
            log.warning("since step %d there are %d micro-batches a lane, but %s", step, count, error)
        self._hosted.reader.begin_again(self.progress.cursor, self.progress.micro_batches)
        self._shortage = shortage
        where = f" in lane {shortage.lanes[0]}" if shortage.lanes else ""
        log.warning("memory ran out at step %d%s: %s; it is done again in %d parts", step, where, shortage.why, count)

    def _evaluate_if_due(self) -> None:
        cursor = self.progress.cursor
        if cursor.phase is Phase.EVALUATED or not self.evaluation.is_due(cursor.step, self.sampler):
            return
        self.watch.check_settings()  # an evaluation takes those that are there for right
        evaluated = self._evaluate(cursor.step)
        metrics, before = evaluated.metrics, self.progress
        has_effects = self.evaluation.has_effects(cursor.step, self.sampler)
        self.progress = before.after_evaluation(
            metrics, self.spec.evaluate, self.spec.early_stop, len(evaluated.bad), has_effects=has_effects
        )
        if has_effects and self.replica.optimizers.reacts:
            self.update.react(metric_of(metrics, self.spec.evaluate.metric or "loss", "evaluate.metric"))
            self.watch.settings.begin()
        self._publish_evaluation(evaluated, before)

    def _evaluate(self, step: int) -> Evaluated:
        self.checkpointer.settle_before()  # averages are evaluated in the place of the parameters
        with self.activity.during(EVALUATION):
            return self.evaluate(step, self.strategy)

    def _next_due(self, most: int = PLANNED) -> int:
        """The next step that the job evaluates or saves after, at most so many from here: nothing follows from those
        before it, unless somebody asks for it."""
        step, evaluation, sampler = self.progress.cursor.step, self.evaluation, self.sampler
        coming = range(step + 1, step + most)
        return next((each for each in coming if self._saves_at(each) or evaluation.is_due(each, sampler)), coming.stop)

    def _save_is_due(self) -> bool:
        """A fact of the state and the job, so all workers find the same without a word."""
        if self.mode.replayed_step is None and self.progress.best is not None and self.progress.is_best:
            return True
        return self._saves_at(self.progress.cursor.step)

    def _saves_at(self, step: int) -> bool:
        """Whether the job's steps ask for a checkpoint after this one."""
        every, replayed = self.spec.checkpoint.every, self.mode.replayed_step
        if replayed is not None:
            return step >= replayed - 1
        if every is None or step == 0:
            return False
        return self.sampler.ends_epoch(step) if every == "epoch" else step % every == 0

    def _begin_save(self, draft: Draft | None = None) -> None:
        with self.activity.during(CHECKPOINT):
            self.watch.check("loss() or metrics()", whole=True)
            self.save_begun()
            self.checkpointer.begin(self.progress, self.strategy, draft)

    def _save(self) -> None:
        with self.activity.during(CHECKPOINT):
            self.watch.check("loss() or metrics()", whole=True)
            self.save_begun()
            self.checkpointer.save(self.progress, self.strategy)

    def _publish_begin(self) -> None:
        event = RunBegan(
            from_step=self.progress.cursor.step,
            total_steps=self.sampler.total_steps,
            steps_per_epoch=self.sampler.steps_per_epoch,
            epoch_length=self.sampler.epoch_length,
            dataset_samples=self.sampler.samples,
            lanes=self.spec.lanes,
            data=TrainingBlocks.of(self.sampler.describe()),
            by_units=self.by_units,
        )
        self.publish(event)
        if not self.progress.cursor.step:
            pace = None
            if schedulers := self.replica.optimizers.schedulers:
                from quorate.replica.rate_schedule import notice_of_pace

                pace = notice_of_pace(self.spec.schedule, schedulers.values(), self.sampler)
            misspelt = notice_of_misspelt(type(self.watch.task))
            few = notice_of_few_samples(self.replica.model, self.spec)
            for notice in filter(None, (pace, misspelt, self.replica.notice_of_left_out(), few)):
                self.publish(LogMessage(step=0, level="warning", message=notice))

    def _of_no_number(self, before: Progress) -> list[str]:
        """What to say of a metric that something waits for, in the first evaluation in which it is NaN."""
        early_stop, metrics = self.spec.early_stop, self.progress.metrics
        watched = {self.spec.evaluate.metric or "loss"} | ({early_stop.metric} if early_stop else set())
        nan = [name for name in sorted(watched & metrics.keys()) if math.isnan(metrics[name])]
        return [
            f"{name} is NaN, which is never the best"
            + (": early_stop waits as if it had not improved" if early_stop and early_stop.metric == name else "")
            for name in nan
            if not math.isnan(before.metrics.get(name, 0.0))
        ]

    def _publish_evaluation(self, evaluated: Evaluated, before: Progress) -> None:
        # An evaluation leaves out the same ones as the last.
        listed = ranges_of(evaluated.bad)[:MOST_RANGES] if evaluated.bad != self._bad_listed else ()
        self._hosted.notes += evaluated.notes
        event = EvaluationDone(
            step=self.progress.cursor.step,
            metrics=evaluated.metrics,
            best=self.progress.best is not before.best,
            bad_samples=len(evaluated.bad),
            bad=listed,
            warnings=(*self._warnings(Source.VALIDATION, evaluated), *self._of_no_number(before)),
        )
        self._bad_listed = evaluated.bad
        self.publish(event)
