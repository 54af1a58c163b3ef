"""Sums over lanes along a ring of links: of workers on several hosts, or with `links: tcp`. Those of one host sum in
`shared_memory`, in the same order, to the same bits."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from queue import Queue

import torch

from quorate.collectives.reduction import PROBES, probe_neighbours
from quorate.core.digests import Buffer
from quorate.core.errors import PeerLost
from quorate.core.generation import Generation, name_of
from quorate.core.spans import BUCKET, GATHER, RECEIVE, SEND, Hop, SpanRecorder
from quorate.lanes.chunks import Visit, cut, plan_exchange
from quorate.wire.link import CLOSED_HERE, Deadline, Link, Tag

REDUCE_CHANNEL = 1
GATHER_CHANNEL = 2
BROADCAST_CHANNEL = 3
PROBE_CHANNEL = 4


Blame = Callable[[BaseException], BaseException]
"""Gives, for the error by which the end of a link was noticed, the one that says why."""


def unchanged(error: BaseException) -> BaseException:
    """The error itself is the reason."""
    return error


class Ring:
    """One worker's place on the ring of a generation. It owns its links: any failure closes both.

    Closing both is what carries bad news round the ring, so that no worker waits for one that has given up.

    It overlaps: most of its time is spent waiting for the network, while a backward pass can compute.
    """

    overlaps = True

    def __init__(
        self,
        generation: Generation,
        worker: int,
        previous: Link,
        next: Link,
        deadline: Deadline,
        blame: Blame = unchanged,
    ) -> None:
        hosting = [member.lanes for member in generation.members]
        plan = plan_exchange(hosting)
        self._generation = generation
        self._position = generation.position(worker)
        self._lanes = hosting[self._position]
        self._visits = plan[self._position]
        self._rounds = 1 + max(visit.round for visits in plan for visit in visits)
        self._previous, self._next = previous, next
        self._deadline = deadline
        self._blame = blame
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        following = generation.members[(self._position + 1) % len(hosting)]
        self._next_name = f"{name_of(following.worker)} ({following.address})"
        self._previous_worker = generation.members[self._position - 1].worker
        self._sender = _Sender(next, following.worker, deadline, self._fail)
        self.spans: SpanRecorder | None = None

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        content = total.detach().view(torch.uint8).numpy().data  # as bytes first: bfloat16 has no NumPy type
        chunks = cut(total.numel(), self._generation.lanes)
        spans = self.spans
        bucket = 0 if spans is None else spans.open(BUCKET, spans.exchange, bucket=index, bytes=len(content))
        with self._exchange():
            for visit in self._visits:
                chunk = chunks[visit.chunk]
                if chunk.start < chunk.stop:
                    self._carry_out(
                        visit,
                        (step, index),
                        [lane_values[lane - self._lanes.start][chunk] for lane in visit.adds],
                        total[chunk],
                        content[chunk.start * total.itemsize : chunk.stop * total.itemsize],
                        bucket,
                    )
        if spans is not None:
            spans.close(bucket)

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        workers = len(self._generation.members)
        payloads = [payload] * workers
        spans = self.spans
        span = 0 if spans is None else spans.open(GATHER, spans.phase, gather=index)
        with self._exchange():
            # Each round passes on what the round before brought, until it has come to the last that lacks it.
            passing = [(self._position - distance) % workers for distance in range(workers)]
            for ours, theirs in pairwise(passing):
                sent = received = None
                if spans is not None:
                    origins = (self._generation.members[position].worker for position in (ours, theirs))
                    sent, received = (Hop(spans, span, {"gather": index, "of": worker}) for worker in origins)
                self._send(self._gather_tag(step, index, ours), payloads[ours], sent)
                payloads[theirs] = self._receive(self._gather_tag(step, index, theirs), received)
        if spans is not None:
            spans.close(span)
        return tuple(payloads)

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        workers = len(self._generation.members)
        distance = (self._position - root) % workers
        last = max(((receiver - root) % workers for receiver in receivers), default=0)
        tag = Tag(self._generation.id, step, BROADCAST_CHANNEL, index)
        with self._exchange():
            if 0 < distance <= last:
                self._receive_into(tag, buffer)
            if distance < last:
                self._send(tag, buffer)

    def round_trip(self) -> float | None:
        previous, following = self._previous, self._next

        def ask(there: Tag, back: Tag) -> None:
            following.send(there, b"", self._deadline)
            following.receive(back, self._deadline)

        def answer(there: Tag, back: Tag) -> None:
            previous.receive(there, self._deadline)
            previous.send(back, b"", self._deadline)

        tags = [(self._probe_tag(2 * probe), self._probe_tag(2 * probe + 1)) for probe in range(PROBES)]
        with self._exchange():
            return probe_neighbours(self._position, tags, ask, answer)

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        chunks = cut(elements, self._generation.lanes)
        sent: int = sum(chunks[visit.chunk].stop - chunks[visit.chunk].start for visit in self._visits if visit.sends)
        return sent * itemsize

    def close(self) -> None:
        self._close_links()
        self._sender.stop()

    def _carry_out(
        self,
        visit: Visit,
        exchange: tuple[int, int],
        terms: list[torch.Tensor],
        total: torch.Tensor,
        content: memoryview,
        bucket: int,
    ) -> None:
        # The sum is formed in its final place. A chunk that comes by again finds that place free: it could only come
        # back after the next worker had taken all of what was sent from there.
        if visit.receives:
            hop = None if self.spans is None else self._hop(bucket, exchange, visit.round, visit.chunk)
            self._receive_into(self._chunk_tag(*exchange, visit.round, visit.chunk), content, hop)
        else:
            # From a copy, not from zeros: 0.0 + -0.0 is 0.0, and the sign is part of the bits.
            total.copy_(terms.pop(0))
        for term in terms:
            total.add_(term)
        if visit.sends:
            hop = None if self.spans is None else self._hop(bucket, exchange, visit.round + 1, visit.chunk)
            self._send(self._chunk_tag(*exchange, visit.round + 1, visit.chunk), content, hop)

    def _hop(self, bucket: int, exchange: tuple[int, int], hop: int, chunk: int) -> Hop:
        """What both ends of a link call one frame."""
        assert self.spans is not None, "nothing is recorded of other steps"
        return Hop(self.spans, bucket, {"bucket": exchange[1], "chunk": chunk, "hop": hop})

    def _chunk_tag(self, step: int, index: int, hop: int, chunk: int) -> Tag:
        """Unlike for every chunk and hop: a frame that is early or late is refused, not added."""
        place = (index * self._rounds + hop) * self._generation.lanes + chunk
        return Tag(self._generation.id, step, REDUCE_CHANNEL, place)

    def _gather_tag(self, step: int, index: int, position: int) -> Tag:
        return Tag(self._generation.id, step, GATHER_CHANNEL, index * len(self._generation.members) + position)

    def _probe_tag(self, index: int) -> Tag:
        return Tag(self._generation.id, 0, PROBE_CHANNEL, index)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Let the first failure of either thread surface, with nothing left running on the caller's tensors."""
        try:
            self._raise_failure()
            yield
            # The caller is free to change `total` once it has it, so nothing may be unsent by then.
            if not self._sender.flush():
                self._raise_failure()
                raise PeerLost(self._next_name, CLOSED_HERE)
        except BaseException as error:
            self._fail(error)
            self.close()
            if self._error is not error and self._error is not None:
                raise self._error from None
            raise

    def _fail(self, error: BaseException) -> None:
        """The first failure is the reason; closing the links makes the other thread fail too, as a consequence."""
        with self._error_lock:
            if self._error is None:
                self._error = self._blame(error)
        self._close_links()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _close_links(self) -> None:
        self._previous.close()
        self._next.close()

    def _send(self, tag: Tag, payload: Buffer, hop: Hop | None = None) -> None:
        self._sender.send(tag, payload, hop)

    def _receive(self, tag: Tag, hop: Hop | None) -> bytes:
        began = 0.0 if hop is None else hop.spans.clock()
        payload = bytes(self._previous.receive(tag, self._deadline))
        if hop is not None:
            hop.add(RECEIVE, began, peer=self._previous_worker)
        return payload

    def _receive_into(self, tag: Tag, content: memoryview, hop: Hop | None = None) -> None:
        began = 0.0 if hop is None else hop.spans.clock()
        self._previous.receive_into(tag, content, self._deadline)
        if hop is not None:
            hop.add(RECEIVE, began, peer=self._previous_worker)


class _Sender:
    """The thread that carries out a ring's sends in program order, while the calling thread receives and adds.

    When a send fails, `on_failure` is told from this thread, at once, and nothing more is sent.
    """

    def __init__(
        self, link: Link, worker: int, deadline: Deadline, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._link = link
        self._worker = worker
        self._deadline = deadline
        self._on_failure = on_failure
        self._frames: Queue[tuple[Tag, Buffer, Hop | None] | None] = Queue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="quorate-ring-sender", daemon=True)
        self._thread.start()

    def send(self, tag: Tag, payload: Buffer, hop: Hop | None = None) -> None:
        """Queue a frame and return; the payload must not change until `flush` has returned."""
        self._frames.put((tag, payload, hop))

    def flush(self) -> bool:
        """Wait until everything queued is sent; false if it never will be: a send failed or the sender stopped."""
        if not self._stopped:  # otherwise there may be nobody who takes frames
            self._frames.join()
        return not self._stopped

    def stop(self) -> None:
        """End the thread, dropping what is not sent. The link must be closed already, so that no send keeps waiting."""
        self._stopped = True
        self._frames.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (frame := self._frames.get()) is not None:
            if not self._stopped:
                self._send(*frame)
            # A payload is a view into a gradient buffer: holding it would keep that memory alive.
            del frame
            self._frames.task_done()
        self._frames.task_done()  # of the end, which is queued like a frame

    def _send(self, tag: Tag, payload: Buffer, hop: Hop | None) -> None:
        began = 0.0 if hop is None else hop.spans.clock()
        try:
            self._link.send(tag, payload, self._deadline)
        except BaseException as error:
            # Told before the flush is released, so that whoever flushed finds the reason.
            self._on_failure(error)
            self._stopped = True
            return
        if hop is not None:
            hop.add(SEND, began, peer=self._worker)
