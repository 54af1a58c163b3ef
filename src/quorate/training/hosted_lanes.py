"""The lanes that a worker hosts, one after the other: what each reads, and what becomes of it. Before them it may run
lanes of others, which it audits."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch

from quorate.core.generation import COMPUTE, DATA, Cursor
from quorate.core.user_code import describe
from quorate.data.bad_sample import LeftOut
from quorate.data.feed import Feed
from quorate.data.indices import joined
from quorate.data.ledger import Tally
from quorate.data.sampler import (
    EvaluationPlan,
    MicroBatchChanges,
    Sampler,
    Source,
    StepPlans,
    planned_requests,
)
from quorate.data.samples import Batch
from quorate.replica.device import Device, digests
from quorate.spec.job import JobSpec
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.audit import LaneAudit, Outcome
from quorate.training.lane import LaneResult, LaneRunner


@dataclass(eq=False)
class LaneReader:
    """Has the batches of lanes in the order of the feed's plan. `last` is the last step, `plans` are those of steps."""

    feed: Feed
    sampler: Sampler
    evaluation: EvaluationPlan
    hosted: range
    activity: Activity
    device: Device
    plans: StepPlans
    last: int
    audited: Callable[[int], Sequence[int]] = lambda _: ()

    def read(self, step: int, lane: int, *, aside: bool = False, again: bool = False) -> list[Batch]:  # noqa: ARG002
        """The micro-batches of a lane, as the feed answers; `aside`: of one that is audited here. `again`: and nothing
        else afterwards, since this generation has no other step."""
        plan = self.plans[step]
        requests = plan.requests.get(lane) or self.sampler.requests(step, lane, self.plans.changes)
        if again:
            self.feed.begin_again(iter(requests))
        samples = requests[0].numbers if len(requests) == 1 else joined([each.numbers for each in requests])
        # Before the first is read: if that kills the worker, somebody can tell which they were.
        self.activity.write_samples(plan.epoch, samples.data)
        return [self.feed.next(request) for request in requests]

    def begin_again(self, cursor: Cursor, changes: MicroBatchChanges) -> None:
        """Read on from here, by another plan."""
        self.plans = StepPlans(self.sampler, self.hosted, changes)
        rest = self.hosted, cursor, changes, self.audited
        self.feed.begin_again(planned_requests(self.sampler, self.evaluation, *rest))


@dataclass(eq=False)
class AheadReader(LaneReader):
    """The same for a device: `read_ahead` has the next lane's batches on their way there while it computes a lane. The
    host has no time to spare while it computes itself."""

    _ahead: tuple[int, int, bool] | None = None
    _batches: list[Batch] = field(default_factory=list)

    def read(self, step: int, lane: int, *, aside: bool = False, again: bool = False) -> list[Batch]:
        place, batches = self._ahead, self._batches
        self._ahead, self._batches = None, []
        if not again and place == (step, lane, aside):
            return batches
        return super().read(step, lane, again=again)

    def read_ahead(self, step: int, lane: int, *, aside: bool = False) -> None:
        """Those of the lane that follows this one, unless an evaluation comes first or the end: the feed answers in the
        order of its plan."""
        rest = self._order(step)
        rest = rest[rest.index((lane, aside)) + 1 :]
        if not rest and (step >= self.last or self.evaluation.is_due(step, self.sampler)):
            return
        place = (step, *rest[0]) if rest else (step + 1, *self._order(step + 1)[0])
        began = perf_counter()
        batches = super().read(*place[:2])
        self.activity.count_as(DATA, perf_counter() - began)
        with suppress(torch.OutOfMemoryError):  # there is room when the lane is done
            batches = [replace(batch, content=self.device.move(batch.content)) for batch in batches]
        self._ahead, self._batches = place, batches

    def _order(self, step: int) -> list[tuple[int, bool]]:
        """The lanes of a step as they are read: those that are audited here, then the hosted ones."""
        return [*((lane, True) for lane in self.audited(step)), *((lane, False) for lane in self.hosted)]

    def begin_again(self, cursor: Cursor, changes: MicroBatchChanges) -> None:
        self._ahead, self._batches = None, []
        super().begin_again(cursor, changes)


@dataclass(eq=False)
class HostedLanes:
    """Reads and computes the lanes of a step. `notes` are what was met with meanwhile and is to be told, `draws` says
    whether random numbers are drawn for samples.

    In a step that is audited, those that this worker audits are computed before its own. Where memory runs out in one,
    nothing is compared: the step goes on without it.
    """

    spec: JobSpec
    hosted: range
    runner: LaneRunner
    reader: LaneReader
    activity: Activity
    device: Device
    check_lease: Callable[[], None]
    audit: LaneAudit | None = None
    notes: list[str] = field(default_factory=list)
    draws: bool = False

    def run(self, step: int, progress: Progress, *, is_audited: bool = False) -> list[LaneResult]:
        """All lanes of a step. Where memory runs out in one, the rest has nothing to do: its gradients are as many
        zeros, for which nobody waits in vain, and the step counts for nothing."""
        if self.audit is not None:
            # Also where no lane is due: another may have a doubt that this worker settles.
            self.audit.compute = partial(self._compute_again, step)
            if is_audited:
                self._audit_others(self.audit, step)
        results: list[LaneResult] = []
        catches = self.spec.on_out_of_memory == "shrink"
        for lane in self.hosted:
            if results and results[-1].shortage:
                self.runner.run(step, lane, (), 0)
                result = LaneResult(lane, 0, shortage=results[-1].shortage)
            elif catches:
                result = self._tried(partial(self.run_lane, step, lane, progress, is_audited), lane)
            else:
                result = self.run_lane(step, lane, progress, is_audited)
            result.micro_batches = self.reader.plans[step].micro_batches
            results.append(result)
        return results

    def run_lane(
        self, step: int, lane: int, progress: Progress, is_audited: bool = False, batch_samples: int | None = None
    ) -> LaneResult:
        """One of them. Its gradient is weighted by its part in so many samples, or else in those of the step."""
        activity = self.activity
        self.check_lease()
        waited = activity.seconds[DATA]
        activity.enter(DATA, lane)
        answers, plan = self.reader.read(step, lane), self.reader.plans[step]
        activity.leave()
        activity.enter(COMPUTE, lane)
        # What the feed has answered with; a ledger of what was planned proves nothing.
        read = [batch.samples if batch.bad else batch.request.numbers for batch in answers]
        batches = [(len(samples), batch.content) for samples, batch in zip(read, answers, strict=True) if len(samples)]
        following: Callable[[], None] | None = None
        if isinstance(self.reader, AheadReader):
            following = partial(self.reader.read_ahead, step, lane)
        of_samples = batch_samples or plan.samples
        result = self.runner.run(step, lane, batches, of_samples, activity.spans, meanwhile=following)
        result.read = read[0] if len(read) == 1 else joined(read)
        activity.leave()
        result.tally, result.data_s = Tally.of(plan.epoch, result.read), activity.seconds[DATA] - waited
        if result.put_back:
            from quorate.training.told_once import news_of_names

            result.put_back = news_of_names(progress.told, result.put_back)
        if self.runner.graphs is not None:
            self.notes += self.runner.graphs.take_notes()
        if any(batch.notes or batch.draws or batch.bad for batch in answers):
            self._note(answers, result, progress)
        if is_audited and self.audit is not None and lane in self.audit.owned(step):
            with suppress(torch.OutOfMemoryError):
                self.runner.digest(result)
        return result

    def take_notes(self) -> list[str]:
        """What is to be told, once."""
        notes, self.notes = self.notes, []
        return notes

    def _note(self, answers: list[Batch], result: LaneResult, progress: Progress) -> None:
        for batch in answers:
            self.notes += batch.notes
            self.draws = self.draws or batch.draws
        if any(batch.bad for batch in answers):
            left_out = LeftOut()
            for batch in answers:
                left_out.extend(batch.bad, batch.why)
            result.bad = left_out.indices
            from quorate.training.told_once import news_of_samples

            # Where a lane has nothing else, the reason of one, since that may be what ends the job.
            alone = left_out.reasons[: 0 if len(result.read) else 1]
            result.why = news_of_samples(Source.TRAINING, progress.told, left_out.reasons) or alone

    def _tried(self, run: Callable[[], LaneResult], lane: int) -> LaneResult:
        """Run a lane; one in which memory runs out is abandoned."""
        try:
            return run()
        except Exception as error:
            from quorate.task.hints import out_of_memory  # rarely

            short = out_of_memory(error)
            if short is None:
                raise
            why = describe(short)
        # Not within the handler, and without its name: the traceback holds what has filled the memory, and this frame.
        del short
        gc.collect()
        self.activity.leave()
        self.runner.abandon(lane)
        self.device.free_unused()
        return LaneResult(lane, 0, shortage=why)

    def _audit_others(self, audit: LaneAudit, step: int) -> None:
        for lane in audit.lanes(step):
            read = partial(self.reader.read, step, lane, aside=True)
            following: Callable[[], None] | None = None
            if isinstance(self.reader, AheadReader):
                following = partial(self.reader.read_ahead, step, lane, aside=True)
            audit.see(lane, self._outcome(self._run_aside(step, lane, read, following)))

    def _compute_again(self, step: int, lane: int) -> Outcome | None:
        """A lane of the present step, to settle a difference."""
        read = partial(self.reader.read, step, lane, again=True)
        return self._outcome(self._run_aside(step, lane, read, by_tensor=True))

    def _run_aside(
        self,
        step: int,
        lane: int,
        read: Callable[[], list[Batch]],
        following: Callable[[], None] | None = None,
        *,
        by_tensor: bool = False,
    ) -> LaneResult:
        """A lane in the place of a hosted one. What it has read, logged and assigned is told by its host."""
        slot, runner = self.hosted[0], self.runner
        self.check_lease()
        self.activity.enter(DATA, lane)
        batches = [(len(batch.samples), batch.content) for batch in read() if len(batch.samples)]
        self.activity.leave()
        if not batches:
            return LaneResult(lane, 0)

        def run() -> LaneResult:
            self.activity.enter(COMPUTE, lane)
            runner.watch.put_back()  # or what was assigned before the step would look like a fault of this worker
            result = runner.run(step, lane, batches, self.reader.plans[step].samples, meanwhile=following)
            with suppress(torch.OutOfMemoryError):  # a digest takes as much again as the gradient
                runner.digest(result, by_tensor=by_tensor)
            runner.read([result])
            self.activity.leave()
            return result

        with runner.aside(slot):
            # A loop of one's own has ended with an error within a lane.
            return self._tried(run, slot) if runner.ended is None else run()

    def _outcome(self, result: LaneResult) -> Outcome | None:
        if result.shortage or (result.samples and not result.digests):
            return None
        tensors = [name for name, _ in self.runner.replica.trainable]
        return Outcome.of(result, digests(result.buffers.items(), self.device), tensors)
