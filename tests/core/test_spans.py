import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core import spans as module
from quorate.core.spans import BUCKET, ROOT, Span, SpanRecorder, covered


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def named(spans: tuple[Span, ...]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def test_phases_are_inside_the_step(clock: Clock) -> None:
    recorder = SpanRecorder("step", clock=clock)
    clock.now += 1
    recorder.enter("data", 3)
    clock.now += 2
    recorder.leave()
    recorder.enter("apply", None)
    clock.now += 4
    recorder.leave()
    assert recorder.take() == (
        Span("step", 100.0, 7.0, ROOT, {}),
        Span("data", 101.0, 2.0, 0, {"lane": 3}),
        Span("apply", 103.0, 4.0, 0, {}),
    )


def test_an_exchange_begins_with_its_first_bucket(clock: Clock) -> None:
    recorder = SpanRecorder("step", clock=clock)
    recorder.enter("compute", 0)
    clock.now += 1
    bucket = recorder.open(BUCKET, recorder.exchange, bucket=0)  # while the backward pass still runs
    clock.now += 1
    recorder.leave()
    recorder.enter("exchange", None)
    clock.now += 1
    recorder.close(bucket)
    recorder.leave()
    spans = recorder.take()
    exchange = named(spans)["exchange"]
    assert (exchange.start, exchange.seconds) == (101.0, 2.0)
    assert spans[named(spans)[BUCKET].parent] == exchange


def test_what_is_open_at_the_end_ends_with_the_root(clock: Clock) -> None:
    recorder = SpanRecorder("step", clock=clock)
    recorder.enter("data", 0)
    clock.now += 3
    assert named(recorder.take())["data"].seconds == 3.0


def test_a_second_exchange_is_a_span_of_its_own(clock: Clock) -> None:
    recorder = SpanRecorder("step", clock=clock)
    for _ in range(2):
        recorder.enter("exchange", None)
        clock.now += 1
        recorder.leave()
    assert [(span.name, span.start) for span in recorder.take()[1:]] == [("exchange", 100.0), ("exchange", 101.0)]


def test_several_threads_add_without_losing_any() -> None:
    recorder = SpanRecorder("step")
    everybody = threading.Barrier(4)

    def work(number: int) -> None:
        everybody.wait()
        for each in range(500):
            parent = recorder.open("bucket", recorder.root, bucket=(number, each))
            recorder.add("send", recorder.clock(), parent, chunk=(number, each))
            recorder.close(parent)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = recorder.take()
    sends = [span for span in spans if span.name == "send"]
    assert len(sends) == 2000
    assert all(spans[span.parent].attributes == {"bucket": span.attributes["chunk"]} for span in sends)


def test_the_first_are_kept_of_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 10)
    recorder = SpanRecorder("step")
    for each in range(20):
        recorder.close(recorder.open("bucket", recorder.exchange, bucket=each))
        recorder.add("send", recorder.clock(), recorder.root)
    recorder.enter("exchange", None)
    recorder.leave()
    assert len(recorder.take()) == 10


def test_the_end_publishes_once(clock: Clock) -> None:
    told: list[tuple[Span, ...]] = []
    publish: Callable[[tuple[Span, ...]], None] = told.append
    recorder = SpanRecorder("save", publish, clock)
    recorder.end()
    assert told == [(Span("save", 100.0, 0.0, ROOT, {}),)]


pieces = st.lists(st.tuples(st.integers(-20, 120), st.integers(0, 60)), max_size=12)


@given(pieces)
def test_the_covered_share_is_the_union_of_what_is_inside(pieces: list[tuple[int, int]]) -> None:
    inside = [Span("x", float(start), float(length), 0, {}) for start, length in pieces]
    seconds = {second for start, length in pieces for second in range(start, start + length)} & set(range(100))
    share = covered((Span("step", 0.0, 100.0, ROOT, {}), *inside))
    assert abs(share - len(seconds) / 100) < 1e-9
