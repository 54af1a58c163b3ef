"""The lanes that a worker hosts, one after the other: what each reads, and what becomes of it."""

import gc
from collections.abc import Callable
from functools import partial

from quorate.core.user_code import describe
from quorate.core.worker_status import COMPUTE, DATA
from quorate.data.bad_sample import LeftOut
from quorate.data.indices import joined
from quorate.data.ledger import Tally
from quorate.data.sampler import micro_batch_count
from quorate.data.samples import Batch
from quorate.spec.job import JobSpec
from quorate.training.activity import Activity
from quorate.training.device import Device
from quorate.training.hints import out_of_memory
from quorate.training.lane import LaneResult, LaneRunner
from quorate.training.lane_reader import LaneReader
from quorate.training.progress import Progress, worth_telling
from quorate.training.state_watch import news


class HostedLanes:
    """Reads and computes the lanes of a step. `notes` are what was met with meanwhile and is to be told, `draws` says
    whether random numbers are drawn for samples."""

    def __init__(
        self,
        spec: JobSpec,
        hosted: range,
        runner: LaneRunner,
        reader: LaneReader,
        activity: Activity,
        device: Device,
        check_lease: Callable[[], None],
    ) -> None:
        self.reader = reader
        self.notes: list[str] = []
        self.draws = False
        self._spec = spec
        self._lanes = hosted
        self._runner = runner
        self._activity = activity
        self._device = device
        self._check_lease = check_lease

    def run(self, step: int, epoch: int, batch_samples: int, progress: Progress, last: int) -> list[LaneResult]:
        """All lanes of a step, of which `last` is the last one. Where memory runs out in one, the rest has nothing to
        do: its gradients are as many zeros, for which nobody waits in vain, and the step counts for nothing."""
        results: list[LaneResult] = []
        count = micro_batch_count(self._spec.accumulate, progress.micro_batches, step)
        for lane in self._lanes:
            if results and results[-1].shortage:
                self._runner.run(step, lane, (), batch_samples)
                result = LaneResult(lane, 0, shortage=results[-1].shortage)
            else:
                run = partial(self.run_lane, step, epoch, lane, batch_samples, progress, last)
                result = self._tried(run, lane, catches=self._spec.on_out_of_memory == "shrink")
            result.micro_batches = count
            results.append(result)
        return results

    def run_lane(
        self, step: int, epoch: int, lane: int, batch_samples: int, progress: Progress, last: int
    ) -> LaneResult:
        """One of them."""
        activity, changes = self._activity, progress.micro_batches
        self._check_lease()
        waited = activity.seconds[DATA]
        activity.enter(DATA, lane)
        answers = self.reader.read(step, lane, changes)
        activity.leave()
        activity.enter(COMPUTE, lane)
        # What the feed has answered with; a ledger of what was planned proves nothing.
        read = [batch.samples for batch in answers]
        batches = [(len(samples), batch.content) for samples, batch in zip(read, answers, strict=True) if len(samples)]
        following = partial(self.reader.read_ahead, step, lane, last, changes)
        result = self._runner.run(step, lane, batches, batch_samples, activity.spans, meanwhile=following)
        result.read = joined(read)
        activity.leave()
        result.tally, result.data_s = Tally.of(epoch, result.read), activity.seconds[DATA] - waited
        if result.put_back:
            result.put_back = news(result.put_back, progress.told)
        self.notes += self._runner.take_notes()
        self._note(answers, result, progress)
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
            result.why = worth_telling(progress.told, left_out.reasons, has_samples=len(result.read) > 0)

    def _tried(self, run: Callable[[], LaneResult], lane: int, *, catches: bool) -> LaneResult:
        """Run a lane; with `catches`, one in which memory runs out is abandoned."""
        try:
            return run()
        except Exception as error:
            short = out_of_memory(error) if catches else None
            if short is None:
                raise
            why = describe(short)
        # Not within the handler, and without its name: the traceback holds what has filled the memory, and this frame.
        del short
        gc.collect()
        self._activity.leave()
        self._runner.abandon(lane)
        self._device.free_unused()
        return LaneResult(lane, 0, shortage=why)
