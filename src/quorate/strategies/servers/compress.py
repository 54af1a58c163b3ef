"""Compressed gradients with parameter servers: what a worker encodes of its lanes, and what a server answers.

Servers answer with deltas, compressed like gradients and with an error feedback of their own: a server knows what
workers have of each block, tells part of the difference between that and its exact values, and what it has not told
stays in the difference. All holders of a block come to the same, so a replica goes on where its primary was.
"""

from collections.abc import Callable, Sequence

import torch

from quorate.core.generation import Generation, Member
from quorate.observe.events import GradientsCompressed
from quorate.strategies.compression.compressor import EncodedLane
from quorate.strategies.compression.deltas import Deltas, EncodedDeltas
from quorate.strategies.compression.residuals import Residuals
from quorate.strategies.servers.encoded_exchange import EncodedExchange
from quorate.strategies.servers.share import Share
from quorate.training.flat_gradients import FlatGradients
from quorate.training.lane import LaneResult


class LaneEncoder:
    """A worker's side: its lanes' gradients, with what they have held back, as the exchange sends them."""

    def __init__(self, exchange: EncodedExchange, gradients: FlatGradients, residuals: Residuals | None) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._residuals = residuals
        self._before = (0, 0)

    def encode(self, step: int, results: Sequence[LaneResult]) -> None:
        """What is held back after the step is written down when this returns, before anything is sent of it."""
        self._before = (self._exchange.bytes_sent, self._exchange.bytes_received)
        self._exchange.lanes = {result.lane: self._encoded(step, result) for result in results}

    def _encoded(self, step: int, result: LaneResult) -> tuple[EncodedLane, ...]:
        compressors, gradient = self._exchange.compressors, self._gradients.lanes[result.lane].buckets
        if self._residuals is not None:
            return self._residuals.encode(compressors, step, result.lane, result.present, gradient)
        return tuple(one.encode(step, result.lane, result.present, gradient) for one in compressors)

    def traffic(self, step: int, generation: Generation, own: Member) -> GradientsCompressed:
        """What this worker has sent and received in the step that was encoded last."""
        exchange, (sent, received) = self._exchange, self._before
        sizes = [len(part.payload) for lane in exchange.lanes.values() for part in lane]
        dense = sum(compressor.dense_bytes for compressor in exchange.compressors)
        return GradientsCompressed(
            step=step,
            generation=str(generation.id),
            worker=own.worker,
            lane_bytes=round(sum(sizes) / len(own.lanes)),
            lane_bytes_dense=dense,
            sent_bytes=exchange.bytes_sent - sent,
            received_bytes=exchange.bytes_received - received,
            sent_bytes_dense=exchange.pushed_dense * len(own.lanes),
            received_bytes_dense=dense,
        )


class Answers:
    """A server's side: its optimizers update the exact values, and workers are told how far theirs are to move."""

    def __init__(self, share: Share, deltas: Deltas, exchange: EncodedExchange) -> None:
        self._exchange = exchange
        self._share = share
        self._deltas = deltas

    def update(self, step: int, update: Callable[[], None]) -> None:
        """Update exact values, and give the parameters the values that workers have after this step."""
        share = self._share
        self._swap()
        update()
        self._swap()
        led = [block for block in share.exact if block in share.primary]
        self._exchange.answer = self._tell(step, led).payload
        self._tell(step, [block for block in share.exact if block not in share.primary])

    def _tell(self, step: int, blocks: Sequence[int]) -> EncodedDeltas:
        share, values = self._share, {}
        with torch.no_grad():
            moved = {block: (share.exact[block] - share.parameter(block)).reshape(-1) for block in blocks}
            told = self._deltas.encode(step, moved)
            for block in blocks:
                values[block] = share.parameter(block).detach().reshape(-1)
            told.add_to(values)
            for block, value in values.items():
                parameter = share.parameter(block)
                if not parameter.is_contiguous():  # then it was a copy that has moved
                    parameter.copy_(value.view(parameter.shape))
        return told

    def _swap(self) -> None:
        """Exact values take the place of the parameters, or the reverse; one block at a time, to spare memory."""
        with torch.no_grad():
            for block, exact in self._share.exact.items():
                parameter = self._share.parameter(block)
                kept = parameter.clone()
                parameter.copy_(exact)
                exact.copy_(kept)
