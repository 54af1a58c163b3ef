"""What a worker does in a step that is traced: spans, kept in memory until the step is over.

Nothing is recorded of other steps: whoever could record something has a recorder, or None.
"""

from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any, NamedTuple

from quorate.core.generation import EXCHANGE

STEP, SAVE = "step", "save"
"""What the root of a recording is called: a step, or a checkpoint on its way; or `join`, the way into a generation."""
CONNECT, BUILD = "connect", "build"
"""On that way, beside the copy of the state: finding the others, and putting the parts of a loop together."""
DIGEST, COPY, WRITE, COMMIT = "digest", "copy", "write", "commit"
"""On the way of a checkpoint."""
FORWARD, BACKWARD, REPLAY = "forward", "backward", "replay"
"""Of a micro-batch; both in one where they were captured."""
PUBLISH = "publish"
"""What a worker keeps and tells of a step when it is done; at the first one it makes room for checkpoints, too."""
BUCKET, GATHER, SEND, RECEIVE = "bucket", "gather", "send", "receive"

ROOT = -1
"""The parent of a root."""
MOST_SPANS = 20_000
"""So many of a step are kept; a model of very many buckets has more, and its trace shows the first."""


class Span(NamedTuple):
    """Something that has begun, and has taken so many seconds. `parent` is the place of another in the same list."""

    name: str
    start: float
    seconds: float
    parent: int
    attributes: dict[str, Any]


class SpanRecorder:
    """The spans of one root, for `publish` at its end. Several threads may add to it: overlapped exchanges and sends
    have their own.

    `phase` is the span of the phase that the training thread is in, `exchange` that of the step's exchange, which is
    there before its phase begins: the first buckets are summed while the backward pass still runs.
    """

    def __init__(
        self,
        root: str,
        publish: Callable[[tuple[Span, ...]], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.clock = clock
        self._publish = publish
        self._numbers = count()
        self._spans: dict[int, list[Any]] = {}
        self.root = self.phase = self.open(root, ROOT)
        self.exchange = self._reserve(EXCHANGE)

    def open(self, name: str, parent: int, **attributes: Any) -> int:
        """A span that begins now; its place, by which it is closed, and is the parent of others."""
        index = self._reserve(name, parent, attributes)
        if index < MOST_SPANS:
            self._spans[index][1] = self.clock()
        return index

    def close(self, index: int) -> None:
        if index < MOST_SPANS:
            self._spans[index][2] = self.clock()

    def add(self, name: str, began: float, parent: int, **attributes: Any) -> None:
        """A span that ends now."""
        index = self._reserve(name, parent, attributes)
        if index < MOST_SPANS:
            self._spans[index][1:3] = began, self.clock()

    def enter(self, phase: str, lane: int | None) -> None:
        """The training thread begins a phase; one is open at a time."""
        if phase == EXCHANGE and self._spans[self.exchange][1] is None:
            self.phase = self.exchange
            self._spans[self.exchange][1] = self.clock()
        else:
            place = self.open(phase, self.root, **({} if lane is None else {"lane": lane}))
            self.phase = place if place < MOST_SPANS else self.root

    def pass_on(self, name: str, began: float) -> float:
        """A part of the phase, such as a forward pass, ends now; when that is, for the next part."""
        self.add(name, began, self.phase, **self._spans[self.phase][4])
        return self.clock()

    def leave(self) -> None:
        if self.phase != self.root:
            self.close(self.phase)
            self.phase = self.root

    def end(self) -> None:
        """The root is over: publish it with all that is in it."""
        self._publish(self.take())

    def take(self) -> tuple[Span, ...]:
        """All of them, by the recorder's clock. The root ends now, and whatever is still open.

        Each is as long as those inside it: so an exchange begins with its first bucket.
        """
        self.close(self.root)
        now = self.clock()
        begun = {index: span for index, span in sorted(self._spans.items()) if span[1] is not None}
        for _, start, end, parent, _ in reversed(begun.values()):
            # A parent is there before its children, so its own parent comes later here.
            if parent in begun:
                outer = begun[parent]
                outer[1] = min(outer[1], start)
                outer[2] = max(outer[2] or 0.0, end or now)
        places = {index: place for place, index in enumerate(begun)}
        return tuple(
            Span(name, start, (end or now) - start, places.get(parent, ROOT), attributes)
            for name, start, end, parent, attributes in begun.values()
        )

    def _reserve(self, name: str, parent: int | None = None, attributes: dict[str, Any] | None = None) -> int:
        index = next(self._numbers)  # in one piece: no other thread gets the same
        if index < MOST_SPANS:
            self._spans[index] = [name, None, None, self.root if parent is None else parent, attributes or {}]
        return index


class Hop(NamedTuple):
    """One frame between two workers, on its way: where it is recorded, and what tells it from others."""

    spans: SpanRecorder
    parent: int
    attributes: dict[str, Any]

    def add(self, name: str, began: float, **peer: int) -> None:
        """It was sent, or received, and that ends now."""
        self.spans.add(name, began, self.parent, **self.attributes, **peer)


def covered(spans: tuple[Span, ...]) -> float:
    """Which share of its root's time is accounted for: the union of all others over the root."""
    root = spans[0]
    if root.seconds <= 0:
        return 1.0
    inside = sorted((span.start, span.start + span.seconds) for span in spans[1:])
    total, reached = 0.0, root.start
    for start, end in inside:
        start, end = max(start, reached), min(end, root.start + root.seconds)
        if end > start:
            total += end - start
            reached = end
    return total / root.seconds
