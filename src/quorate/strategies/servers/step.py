"""One synchronous step with parameter servers: push, agree, update, pull.

::

    worker   lanes ─ push ─┐          ┌─ notes ─┐           ┌─ norms ─┐            ┌─ pull ─ buffers, schedule, average
    server           receive          │         │  add up   │         │  optimizer │
                                      agreement             all are prepared       publish

Lanes are summed in the order of the ring, clipping sees the norms of all parameters, and everything else is what every
strategy shares: the bits are those of the ring. Whoever has the norms of all knows that every server could complete the
step. So a server that is cut off before it has them completes it in the next generation, if anybody has.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quorate.core.errors import LinkError
from quorate.core.generation import Generation, Member
from quorate.core.worker_status import EXCHANGE, OTHERS
from quorate.reduce.reduction import Reduction
from quorate.strategies.agreement import StepAgreement
from quorate.strategies.ring import GATHER_INDEX
from quorate.strategies.servers.align import Pending
from quorate.strategies.servers.compress import Answers, LaneEncoder
from quorate.strategies.servers.exchange import Exchange
from quorate.strategies.servers.layout import writing_order
from quorate.strategies.servers.row_exchange import RowExchange
from quorate.strategies.servers.row_gradients import RowGradients
from quorate.strategies.servers.share import Share
from quorate.strategies.servers.update import HeldGradients, PulledUpdate, ServerUpdate, total_norms
from quorate.training.activity import Activity
from quorate.training.flat_gradients import flattened, shaped
from quorate.training.gradients import Gradients
from quorate.training.lane import LaneResult
from quorate.training.progress import Progress
from quorate.training.strategy import Agreement, StepOutcome, StepRequest, advanced
from quorate.training.update import Update

log = logging.getLogger(__name__)

NORMS_INDEX = 8
"""Tells the norms of gradients from what else is gathered in a step."""


class Memory(Protocol):
    """What outlives a generation: the step that is under way, and the norms of the last one that was completed."""

    pending: Pending | None
    norms: Mapping[str, float] | None


@dataclass(frozen=True)
class StepParts:
    """What a member's steps are made of in one generation."""

    generation: Generation
    own: Member
    links: Reduction
    exchange: Exchange
    rows: RowExchange | None
    agreement: StepAgreement
    share: Share
    update: Update
    activity: Activity
    memory: Memory
    encoder: LaneEncoder | None = None
    answers: Answers | None = None


class _Step:
    """What a worker and a server have in common."""

    def __init__(self, parts: StepParts, gradients: Gradients) -> None:
        self.worker = parts.own.worker
        self.hosted = parts.own.lanes
        self.leads = parts.share.number == 0
        self._links = parts.links
        self._exchange = parts.exchange
        self._rows = parts.rows
        self._gradients = gradients
        self._agreement = parts.agreement
        self._share = parts.share
        self._update = parts.update
        self._activity = parts.activity
        self._memory = parts.memory
        self._order = writing_order(parts.generation)

    def begin(self, step: int) -> None:  # noqa: ARG002
        self._links.spans = self._activity.spans

    def gather(self, step: int, payload: bytes) -> tuple[bytes, ...]:
        with self._activity.waiting(OTHERS):
            told = self._links.gather(step, GATHER_INDEX, payload)
        return tuple(told[position] for position in self._order)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._exchange.close()
        self._links.close()
        self._gradients.close()

    def _gather_norms(self, step: int, agreed: Agreement, own: Mapping[int, float]) -> dict[str, float]:
        told = self._links.gather(step, NORMS_INDEX, json.dumps(sorted(own.items())).encode())
        norms = {block: norm for payload in told for block, norm in json.loads(payload)}
        parameters = [parameter for _, parameter in self._share.replica.trainable]
        return total_norms(self._update, parameters, norms, self._share.replica.device) if not agreed.is_void else {}


class WorkerStep(_Step):
    """A worker's side: its lanes' gradients go to the servers, and their new values come back."""

    def __init__(self, parts: StepParts, gradients: Gradients) -> None:
        super().__init__(parts, gradients)
        self._by_rows = gradients if isinstance(gradients, RowGradients) else None
        sparse = self._by_rows.by_rows if self._by_rows is not None else frozenset()
        dense = {b: p for b, (_, p) in enumerate(self._share.replica.trainable) if b not in sparse}
        self._pulled = {block: self._exchange.room(block) for block in dense}
        lie = self._share.as_they_lie
        self._values = [(p, shaped(self._pulled[block], p, as_they_lie=lie)) for block, p in dense.items()]
        for block, p in dense.items() if parts.encoder is not None else ():
            # What comes may be how far they have moved.
            self._pulled[block].copy_(p.detach().reshape(-1))
        self._following = PulledUpdate(self._update, self._activity, self._share.replica.optimizers)
        self._encoder = parts.encoder
        self._tells = parts.encoder is not None
        self._generation, self._own = parts.generation, parts.own

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> StepOutcome:
        self._activity.enter(EXCHANGE)
        if self._encoder is not None:
            self._encoder.encode(step, results)
        self._exchange.push(step)
        if self._rows is not None and self._by_rows is not None:
            self._rows.push(step, self._by_rows.rows)
        agreed = self._agreement.reach(step, results, request)
        norms = self._gather_norms(step, agreed, {})
        self._exchange.pull(step, self._pulled)
        changed = {} if self._rows is None else self._rows.pull(step)
        rows = [(self._share.parameter(block), some) for block, some in changed.items()]
        self._activity.leave()
        self._share.begin_update(agreed)
        self._following.complete(step, agreed, self._values, rows)
        self._share.commit(step, agreed)
        self._memory.norms = norms
        if self._encoder is None or not self._tells or agreed.is_void:
            return StepOutcome(agreed, norms)
        # Once in a generation: steps differ by a few bytes.
        self._tells = False
        return StepOutcome(agreed, norms, (self._encoder.traffic(step, self._generation, self._own),))


class ServerStep(_Step):
    """A server's side: it sums what the lanes have of the blocks that it holds, and updates these."""

    def __init__(self, parts: StepParts, gradients: HeldGradients, clip: float | None) -> None:
        super().__init__(parts, gradients)
        self._held = gradients
        self._updating = ServerUpdate(self._update, self._share, self._held, clip, self._activity, parts.answers)

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> StepOutcome:
        self._activity.enter(EXCHANGE)
        self._exchange.receive(step)
        if self._rows is not None:
            self._rows.receive(step)
        agreed = self._agreement.reach(step, results, request)
        # Everybody has taken up what it was to have, and completed the step before.
        self._share.drop_surplus()
        self._memory.pending = None
        if not agreed.is_void:
            self._exchange.add_up(step, self._held.totals)
            if self._rows is not None:
                self._held.take_rows(self._rows.add_up())
        own = self._updating.prepare(agreed)
        self._memory.pending = Pending(step, lambda norms, progress: self._complete(step, agreed, norms, progress))
        norms = self._gather_norms(step, agreed, own)
        self._activity.leave()
        self._updating.complete(step, agreed, norms)
        self._memory.pending, self._memory.norms = None, norms
        self._activity.enter(EXCHANGE)
        try:
            self._exchange.publish(step, self._own_values())
            if self._rows is not None:
                self._rows.publish(step, {} if agreed.is_void else self._held.changed_rows(self._share.primary))
        except LinkError as error:
            # The step is completed here, whoever has not heard of it: the links are closed, which the next one meets.
            log.info("step %d is completed, but could not be published: %s", step, error)
        self._activity.leave()
        return StepOutcome(agreed, norms)

    def _own_values(self) -> dict[int, torch.Tensor]:
        blocks = [block for block in self._share.primary if block in self._held.totals]
        lie = self._share.as_they_lie
        return {block: flattened(self._share.parameter(block), as_they_lie=lie) for block in blocks}

    def _complete(self, step: int, agreed: Agreement, norms: Mapping[str, float], progress: Progress) -> Progress:
        self._updating.complete(step, agreed, norms)
        self._memory.pending, self._memory.norms = None, norms
        return advanced(progress, agreed)
