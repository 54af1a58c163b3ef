"""The state of a job on its way from one worker's memory to those that need it."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import xxhash

from quorate.checkpoint.tree import Encoded, as_bytes, encoded_in
from quorate.collectives.reduction import Reduction
from quorate.core.digests import Buffer
from quorate.core.errors import WorkerUnfit
from quorate.core.generation import OTHERS, Generation, name_of
from quorate.core.machine import fresh_memory
from quorate.replica.device import digests
from quorate.replica.state_layout import StateLayout
from quorate.task.progress import Progress
from quorate.training.activity import Activity
from quorate.training.divergence import COMPARE_INDEX, Voucher, compare_replicas

log = logging.getLogger(__name__)

PIECE = 8 * 2**20
"""Bytes that are passed on at a time: all the memory that a copy costs whoever does not receive it."""

Broadcast = Callable[[memoryview, Collection[int]], None]
"""Fills the buffers of these receivers with the donor's; all members call it in the same order."""


def align(
    generation: Generation,
    worker: int,
    reduction: Reduction,
    layout: StateLayout,
    progress: Progress,
    activity: Activity,
) -> tuple[Progress, int]:
    """Have whoever is behind take up the state of its donor; the progress that it has then, and the bytes it took."""
    donors = layout.donors(generation)
    if not donors:
        return progress, 0
    step, position = generation.cursor.step, generation.position(worker)
    # Somebody may be behind and have no donor: a part of a sharded state that is lost comes from a checkpoint.
    own = None if worker in generation.behind else layout.state(progress)
    if own is not None:
        own.device.synchronize()
    with activity.waiting(OTHERS):
        # Nobody copies a state before all who hold it have found that they hold the same.
        voucher = None
        if own is not None:
            held = digests(own.compared.items(), own.device)
            voucher = Voucher(worker, held, is_partial=not own.is_whole, settings=own.settings)
        compare_replicas(step, voucher, partial(reduction.gather, step, COMPARE_INDEX))
    copied = 0
    passing = Passing(generation, position, reduction, activity)
    for donor in sorted(set(donors.values())):
        receivers = [receiver for receiver, of in donors.items() if of == donor]
        encoded, size = passing.copy(donor, receivers, None if own is None else own.common)
        if encoded is not None:
            progress = layout.load(encoded)
        copied += size
    return progress, copied


@dataclass
class Passing:
    """Passes states from one member to others; all members call it, with the same donors and receivers, in order."""

    generation: Generation
    position: int
    reduction: Reduction
    activity: Activity

    def __post_init__(self) -> None:
        self._step = self.generation.cursor.step
        # Each broadcast under a number of its own: a piece that comes out of turn is refused.
        self._numbers = count()

    def copy(self, donor: int, receivers: Collection[int], own: Encoded | None) -> tuple[Encoded | None, int]:
        """What a receiver gets of the donor, who gives its `own`; and how many bytes that was. By ring positions."""
        broadcast = partial(self._broadcast, donor)
        # Everybody has to know the size, to know how many pieces follow.
        told = memoryview(bytearray(8))
        everybody = range(len(self.generation.members))
        if self.position == donor and own is not None:
            source, size = as_bytes(own)
            told[:] = size.to_bytes(8)
            broadcast(told, everybody)
            _send(source, size, receivers, broadcast)
            return None, size
        broadcast(told, everybody)
        size = int.from_bytes(told)
        if self.position not in receivers:
            _pass_on(size, receivers, broadcast)
            return None, size
        encoded = _receive(size, receivers, broadcast, self._step)
        giver = self.generation.members[donor].worker
        log.info("copied the state at step %d (%d bytes) from %s", self._step, size, name_of(giver))
        return encoded, size

    def _broadcast(self, donor: int, buffer: memoryview, receivers: Collection[int]) -> None:
        with self.activity.waiting(OTHERS):
            self.reduction.broadcast(self._step, next(self._numbers), donor, buffer, receivers)


def _send(source: Iterator[Buffer], size: int, receivers: Collection[int], broadcast: Broadcast) -> None:
    digest = xxhash.xxh3_128()
    for piece in _pieces(source, size):
        digest.update(piece)
        broadcast(piece, receivers)
    broadcast(memoryview(bytearray(digest.digest())), receivers)


def _receive(size: int, receivers: Collection[int], broadcast: Broadcast, step: int) -> Encoded:
    """Straight into memory of its own, from where it may be taken up.

    If the donor dies half way, this worker still holds a state that it can go on from.
    """
    content = fresh_memory(size)
    digest = xxhash.xxh3_128()
    for start in range(0, size, PIECE):
        broadcast(content[start : start + PIECE], receivers)
        digest.update(content[start : start + PIECE])
    sent = bytearray(digest.digest_size)
    broadcast(memoryview(sent), receivers)
    if sent != digest.digest():
        raise WorkerUnfit(f"the state that it has copied at step {step} is not the one that was sent.")
    return encoded_in(content)


def _pass_on(size: int, receivers: Collection[int], broadcast: Broadcast) -> None:
    scratch = memoryview(bytearray(max(16, min(PIECE, size))))
    for start in range(0, size, PIECE):
        broadcast(scratch[: min(PIECE, size - start)], receivers)
    broadcast(scratch[:16], receivers)


def _pieces(chunks: Iterator[Buffer], size: int) -> Iterator[memoryview]:
    """The same bytes in pieces of equal size, all in the same memory: each is sent before the next is asked for."""
    scratch = memoryview(bytearray(min(PIECE, size)))
    filled = 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            taken = min(len(scratch) - filled, len(rest))
            scratch[filled : filled + taken] = rest[:taken]
            filled, rest = filled + taken, rest[taken:]
            if filled == len(scratch):
                yield scratch
                filled = 0
    if filled:
        yield scratch[:filled]
