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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quorate.core.errors import LinkError
from quorate.core.generation import EXCHANGE
from quorate.replica.flat_gradients import FlatGradients, flattened, shaped
from quorate.replica.gradients import norms_of
from quorate.spec.job import JobSpec
from quorate.strategies.agreement import StepAgreement
from quorate.strategies.servers.align import Aligner
from quorate.strategies.servers.compress import Answers, EncodedExchange
from quorate.strategies.servers.exchange import Exchange
from quorate.strategies.servers.member import MemberConnection, MemberStrategy
from quorate.strategies.servers.rows import RowExchange, RowGradients, Rows
from quorate.strategies.servers.share import Pending
from quorate.strategies.servers.update import HeldGradients, total_norms
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.divergence import ReplicaDigests
from quorate.training.lane import LaneResult
from quorate.training.strategy import Agreement, StepRequest, Strategy, advanced
from quorate.training.update import Update

log = logging.getLogger(__name__)

NORMS_INDEX = 8
"""Tells the norms of gradients from what else is gathered in a step."""


@dataclass
class ServersConnection(MemberConnection):
    """One member's connection to the others of its generation."""

    spec: JobSpec
    exchange: Exchange
    rows: RowExchange | None = None

    def align(self, progress: Progress, activity: Activity, hold: Callable[[Progress], None]) -> tuple[Progress, int]:
        aligner = Aligner(self.generation, self.own.worker, self.links, self.share, activity, hold)
        aligned = aligner.run(progress, self.placement)
        self.log_placement()
        return aligned

    def strategy(self, update: Update, activity: Activity) -> Strategy:
        share = self.share
        if share.residuals is not None:
            share.residuals.settle(self.generation, self.endpoint.position, self.links, activity)
        kind = ServerStep if share.is_server else WorkerStep
        return kind(self, update, activity)


class _Step(MemberStrategy):
    """What a worker and a server have in common."""

    def __init__(self, connection: ServersConnection, update: Update, activity: Activity) -> None:
        super().__init__(connection, activity)
        self._exchange, self._rows = connection.exchange, connection.rows
        self._update = update
        self._replica = replica = self.share.replica
        self._agreement = StepAgreement(
            self._links.gather,
            connection.generation.members,
            connection.own,
            [parameter for _, parameter in replica.trainable],
            replica.buffers,
            None if self.share.is_server else ReplicaDigests(replica),
            replica.optimizers.settings,
            skips=connection.spec.on_nonfinite_loss == "skip",
        )
        self._agreement.audit = update.audit

    def begin(self, step: int) -> None:  # noqa: ARG002
        self._links.spans = self._activity.spans

    def _gather_norms(self, step: int, agreed: Agreement, own: Mapping[int, float]) -> dict[str, float]:
        told = self._links.gather(step, NORMS_INDEX, json.dumps(sorted(own.items())).encode())
        norms = {block: norm for payload in told for block, norm in json.loads(payload)}
        parameters = [parameter for _, parameter in self._replica.trainable]
        return {} if agreed.is_void else total_norms(self._update, parameters, norms, self._replica.device)


class WorkerStep(_Step):
    """A worker's side: its lanes' gradients go to the servers, and their new values come back."""

    def __init__(self, connection: ServersConnection, update: Update, activity: Activity) -> None:
        super().__init__(connection, update, activity)
        gradients, exchange = connection.gradients, connection.exchange
        self._by_rows = gradients if isinstance(gradients, RowGradients) else None
        self._encoded = exchange if isinstance(exchange, EncodedExchange) else None
        # Once in a generation: steps differ by a few bytes.
        self._tells = self._encoded is not None
        sparse = self._by_rows.by_rows if self._by_rows is not None else frozenset()
        dense = {b: p for b, (_, p) in enumerate(self._replica.trainable) if b not in sparse}
        self._pulled = {block: self._exchange.room(block) for block in dense}
        lie = self.share.as_they_lie
        self._values = [shaped(self._pulled[block], p, as_they_lie=lie) for block, p in dense.items()]
        self._targets: list[torch.Tensor] = list(dense.values())
        for block, p in dense.items() if self._encoded is not None else ():
            # What comes may be how far they have moved.
            self._pulled[block].copy_(p.detach().reshape(-1))
        for optimizer in self._replica.optimizers.by_name.values():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or its schedule warns that it never steps

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        self._activity.enter(EXCHANGE)
        if self._encoded is not None:
            gradients = self.connection.gradients
            assert isinstance(gradients, FlatGradients), "a worker has those of its lanes"
            self._encoded.encode(step, results, gradients, self.share.residuals)
        self._exchange.push(step)
        if self._rows is not None and self._by_rows is not None:
            self._rows.push(step, self._by_rows.rows)
        agreed = self._agreement.reach(step, results, request)
        norms = self._gather_norms(step, agreed, {})
        self._exchange.pull(step, self._pulled)
        rows = {} if self._rows is None else self._rows.pull(step)
        self._activity.leave()
        self.share.begin_update(agreed)
        self._update.begin()
        if agreed.is_void:
            self._update.leave_out(step)
        else:
            self._update.change(step, agreed, partial(self._take_up, rows))
        self._activity.leave()
        self.share.commit(step, agreed)
        self.share.norms = norms
        if self._encoded is None or not self._tells or agreed.is_void:
            return agreed._replace(norms=norms)
        self._tells = False
        return agreed._replace(norms=norms, told=(self._encoded.traffic(step, self.connection.own),))

    def _take_up(self, rows: Mapping[int, Rows]) -> None:
        """What a worker does instead of an optimizer's step."""
        with torch.no_grad():
            if self._targets:
                torch._foreach_copy_(self._targets, self._values)
            for block, changed in rows.items():
                changed.put_into(self.share.parameter(block))


class ServerStep(_Step):
    """A server's side: it sums what the lanes have of the blocks that it holds, and updates these."""

    def __init__(self, connection: ServersConnection, update: Update, activity: Activity) -> None:
        super().__init__(connection, update, activity)
        assert isinstance(connection.gradients, HeldGradients)
        self._held, self._clip = connection.gradients, connection.spec.clip_norm
        self._answers = None
        if isinstance(connection.exchange, EncodedExchange) and connection.exchange.tells_deltas:
            self._answers = Answers(self.share, connection.exchange)

    def advance(self, step: int, results: Sequence[LaneResult], request: StepRequest) -> Agreement:
        self._activity.enter(EXCHANGE)
        self._exchange.receive(step)
        if self._rows is not None:
            self._rows.receive(step)
        agreed = self._agreement.reach(step, results, request)
        # Everybody has taken up what it was to have, and completed the step before.
        self.share.drop_surplus()
        self.share.pending = None
        own = {} if agreed.is_void else self._add_up(step, agreed)

        def complete(norms: Mapping[str, float], progress: Progress) -> Progress:
            self._complete(step, agreed, norms)
            return advanced(progress, agreed)

        self.share.pending = Pending(step, complete)
        norms = self._gather_norms(step, agreed, own)
        self._activity.leave()
        self._complete(step, agreed, norms)
        self._activity.enter(EXCHANGE)
        try:
            self._publish(step, agreed)
        except LinkError as error:
            # The step is completed here, whoever has not heard of it: the links are closed, which the next one meets.
            log.info("step %d is completed, but could not be published: %s", step, error)
        self._activity.leave()
        return agreed._replace(norms=norms)

    def _add_up(self, step: int, agreed: Agreement) -> dict[int, float]:
        """Make the sums gradients of a mean; the norms of those of which this server is the primary."""
        self._exchange.add_up(step, self._held.totals)
        if self._rows is not None:
            self._held.take_rows(self._rows.add_up())
        self._update.install(agreed.present, agreed)
        blocks = [block for block in self.share.primary if agreed.present >> block & 1]
        gradients = [self.share.parameter(block).grad for block in blocks]
        values = [one._values() if one.is_sparse else one for one in gradients if one is not None]
        return dict(zip(blocks, self._replica.device.numbers(norms_of(values))(), strict=True))

    def _complete(self, step: int, agreed: Agreement, norms: Mapping[str, float]) -> None:
        """All servers have told their norms: clip by them, and update."""
        update, optimizers, answers = self._update, self._replica.optimizers, self._answers
        update.begin()
        if agreed.is_void:
            update.leave_out(step)
        else:
            self.share.begin_update(agreed)
            self._held.install(agreed.present)
            for name, norm in norms.items() if self._clip is not None else ():
                self._held.clip(update.parameters_of(name), agreed.present, norm, self._clip)
            change = optimizers.update if answers is None else partial(answers.update, step, optimizers.update)
            update.change(step, agreed, change)
        self.share.commit(step, agreed)
        self._activity.leave()
        self.share.pending, self.share.norms = None, norms

    def _publish(self, step: int, agreed: Agreement) -> None:
        lie = self.share.as_they_lie
        blocks = [block for block in self.share.primary if block in self._held.totals]
        values = {block: flattened(self.share.parameter(block), as_they_lie=lie) for block in blocks}
        self._exchange.publish(step, values)
        if self._rows is not None:
            self._rows.publish(step, {} if agreed.is_void else self._held.changed_rows(self.share.primary))
