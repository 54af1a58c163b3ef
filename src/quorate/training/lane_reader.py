"""What a lane reads of a step: from the feed, and on a device of its own before the lane is run."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

import torch

from quorate.core.generation import Cursor
from quorate.core.worker_status import DATA
from quorate.data.feed import Feed
from quorate.data.indices import joined
from quorate.data.sampler import EvaluationPlan, MicroBatchChanges, Request, Sampler, Source, planned_requests
from quorate.data.samples import Batch
from quorate.training.activity import Activity
from quorate.training.device import Device


class LaneReader:
    """Has the batches of lanes in the order of the feed's plan.

    `read_ahead` has the next lane's batches on their way to the device while that computes a lane. The host has no time
    to spare while it computes itself: there nobody reads ahead.
    """

    def __init__(
        self,
        feed: Feed,
        sampler: Sampler,
        evaluation: EvaluationPlan,
        hosted: range,
        activity: Activity,
        device: Device,
        audited: Callable[[int], Sequence[int]] = lambda _: (),
    ) -> None:
        self._feed = feed
        self._sampler = sampler
        self._evaluation = evaluation
        self._hosted = hosted
        self._activity = activity
        self._device = device
        self._audited = audited
        self._ahead: tuple[int, int, bool] | None = None
        self._batches: list[Batch] = []

    def read(self, step: int, lane: int, changes: MicroBatchChanges, *, aside: bool = False) -> list[Batch]:
        """The micro-batches of a lane, as the feed answers; `aside`: of one that is audited here."""
        place, batches = self._ahead, self._batches
        self._ahead, self._batches = None, []
        return batches if place == (step, lane, aside) else self._ask(step, lane, changes)

    def read_ahead(self, step: int, lane: int, last: int, changes: MicroBatchChanges, *, aside: bool = False) -> None:
        """Those of the lane that follows this one, unless an evaluation comes first or the end, at step `last`: the
        feed answers in the order of its plan."""
        if self._device.is_host:
            return
        rest = self._order(step)
        rest = rest[rest.index((lane, aside)) + 1 :]
        if not rest and (step >= last or self._evaluation.is_due(step, self._sampler)):
            return
        place = (step, *rest[0]) if rest else (step + 1, *self._order(step + 1)[0])
        began = perf_counter()
        batches = self._ask(*place[:2], changes)
        self._activity.count_as(DATA, perf_counter() - began)
        with suppress(torch.OutOfMemoryError):  # there is room when the lane is done
            batches = [replace(batch, content=self._device.move(batch.content)) for batch in batches]
        self._ahead, self._batches = place, batches

    def _order(self, step: int) -> list[tuple[int, bool]]:
        """The lanes of a step as they are read: those that are audited here, then the hosted ones."""
        return [*((lane, True) for lane in self._audited(step)), *((lane, False) for lane in self._hosted)]

    def begin_again(self, cursor: Cursor, changes: MicroBatchChanges) -> None:
        """Read on from here, by another plan."""
        self._ahead, self._batches = None, []
        plan = planned_requests(self._sampler, self._evaluation, self._hosted, cursor, changes, self._audited)
        self._feed.begin_again(plan)

    def read_again(self, step: int, lane: int, changes: MicroBatchChanges) -> list[Batch]:
        """What a lane of the present step reads, and nothing else afterwards: this generation has no other step."""
        self._feed.begin_again(iter(self._requests(step, lane, changes)))
        return self._ask(step, lane, changes)

    def _ask(self, step: int, lane: int, changes: MicroBatchChanges) -> list[Batch]:
        requests = self._requests(step, lane, changes)
        # Before the first is read: if that kills the worker, somebody can tell which they were.
        self._activity.write_samples(self._sampler.epoch_of(step), joined([each.numbers for each in requests]).data)
        return [self._feed.next(request) for request in requests]

    def _requests(self, step: int, lane: int, changes: MicroBatchChanges) -> list[Request]:
        epoch, planned = self._sampler.epoch_of(step), self._sampler.micro_batches(step, lane, changes)
        return [Request(Source.TRAINING, epoch, samples, lane) for samples in planned]
