"""What belongs together in traces, and the one time line."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quorate.core.spans import ROOT, Span
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, HostedLanes, WorkerLost
from quorate.observe.seldom_events import StepTraced
from quorate.observe.traces import COORDINATOR, RecoveryTracer, TracedSpan, corrected, span_id, spans_of, trace_id

RUN = "digits-0001 2026-01-01"


def hop(name: str, peer: int, start: float = 0.0, seconds: float = 0.1, chunk: int = 0) -> Span:
    return Span(name, start, seconds, 1, {"bucket": 0, "chunk": chunk, "hop": 1, "peer": peer})


def step_of(worker: int, *spans: Span, generation: str = "1.1", step: int = 5, began: float = 1000.0) -> StepTraced:
    own = (Span("step", 0.0, 1.0, ROOT, {}), Span("exchange", 0.0, 1.0, 0, {}), *spans)
    return StepTraced(step=step, generation=generation, worker=worker, first=0, began=began, spans=own)


# --- ids


def test_ids_are_functions_of_run_generation_and_step() -> None:
    assert trace_id(RUN, "1.1", 5) == trace_id(RUN, "1.1", 5)
    others = [trace_id(RUN, "1.1", 6), trace_id(RUN, "1.2", 5), trace_id("digits-0001 2026-01-02", "1.1", 5)]
    assert len({trace_id(RUN, "1.1", 5), *others}) == 4
    assert len(trace_id(RUN, "1.1", 5)) == 32
    assert len(span_id("t", 0, "step", "data #0")) == 16


def test_all_workers_of_a_step_are_in_one_trace_below_the_first() -> None:
    first, second = (spans_of(RUN, step_of(worker)) for worker in (0, 1))
    assert {span.trace_id for span in (*first, *second)} == {trace_id(RUN, "1.1", 5)}
    assert first[0].parent_id is None
    assert second[0].parent_id == first[0].span_id
    assert second[1].parent_id == second[0].span_id
    assert len({span.span_id for span in (*first, *second)}) == 4


def test_a_receive_is_linked_to_its_send_without_a_word_between_the_workers() -> None:
    sender = spans_of(RUN, step_of(1, hop("send", 2, chunk=1), hop("send", 2, chunk=0)))
    receiver = spans_of(RUN, step_of(2, hop("receive", 1, chunk=0), hop("receive", 1, chunk=1)))
    assert [span.cause for span in receiver[2:]] == [sender[3].span_id, sender[2].span_id]


def test_what_happens_twice_has_two_ids_which_are_linked_in_order() -> None:
    notes = {"gather": 2, "of": 0}
    sender = spans_of(RUN, step_of(0, *(Span("send", at, 0.1, 1, {**notes, "peer": 1}) for at in (0.1, 0.6))))
    receiver = spans_of(RUN, step_of(1, *(Span("receive", at, 0.1, 1, {**notes, "peer": 0}) for at in (0.1, 0.6))))
    assert [span.cause for span in receiver[2:]] == [span.span_id for span in sender[2:]]
    assert sender[2].span_id != sender[3].span_id


def test_a_checkpoint_on_its_way_is_inside_its_step() -> None:
    step = spans_of(RUN, step_of(1))
    save = StepTraced(step=5, generation="1.1", worker=1, began=1002.0, spans=(Span("save", 0.0, 3.0, ROOT, {}),))
    (saved,) = spans_of(RUN, save)
    assert (saved.trace_id, saved.parent_id) == (step[0].trace_id, step[0].span_id)


# --- one time line


def frames(true: list[tuple[float, int, float]], shifts: list[float]) -> list[TracedSpan]:
    """Frames round a ring that are sent at a time by a worker, and take so long; told by clocks that are wrong."""
    spans = []
    workers = len(shifts)
    for number, (sent, worker, took) in enumerate(true):
        other = (worker + 1) % workers
        send, receive = f"s{number}", f"r{number}"
        spans.append(TracedSpan("t", send, None, worker, "send", sent + shifts[worker], took / 2))
        start = sent + shifts[other]
        spans.append(TracedSpan("t", receive, None, other, "receive", start, took, {}, cause=send))
    return spans


def violations(spans: list[TracedSpan]) -> list[float]:
    by_id = {span.span_id: span for span in spans}
    late = (by_id[span.cause].start - span.end for span in spans if span.cause is not None)
    return [by for by in late if by > 1e-9]


@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 2), st.floats(0.0, 0.01)), max_size=20),
    st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3),
)
def test_no_effect_precedes_its_cause_however_wrong_clocks_are(
    true: list[tuple[float, int, float]], shifts: list[float]
) -> None:
    told = frames(true, shifts)
    right = corrected(told)
    assert not violations(right)
    for before, after in zip(told, right, strict=True):
        assert abs(after.start - before.start) <= max(map(abs, shifts)) + 1e-9
        assert replace(after, start=before.start) == before


def test_clocks_that_contradict_nothing_stay() -> None:
    told = frames([(1.0, 0, 0.1), (2.0, 1, 0.1), (3.0, 2, 0.1)], [0.0, 0.01, -0.01])
    assert corrected(told) == told


def test_a_clock_that_drifts_within_a_step_is_left_as_it_is() -> None:
    """Nothing fits: each of two is later than the other."""
    told = frames([(1.0, 0, 0.1), (2.0, 1, 0.1)], [0.0, 0.0])
    impossible = [replace(span, start=span.start - 1.0) if span.name == "receive" else span for span in told]
    assert corrected(impossible) == impossible


# --- recoveries

MEMBERS = tuple(HostedLanes(worker, f"h:{worker}", (worker,)) for worker in range(3))


def recovery_events() -> list[Event]:
    join = StepTraced(
        step=8,
        generation="1.2",
        worker=1,
        began=1003.0,
        spans=(Span("join", 0.0, 1.0, ROOT, {}), Span("copy", 0.25, 0.5, 0, {})),
    )
    return [
        GenerationFormed(time=900.0, generation="1.1", members=MEMBERS, from_step=0),
        WorkerLost(time=1002.0, step=8, worker=2, detect_s=0.5, message="worker 2 was killed."),
        GenerationFormed(time=1003.0, generation="1.2", members=MEMBERS[:2], from_step=7),
        join,
        step_of(0, generation="1.2", step=8, began=1004.0),
        step_of(1, generation="1.2", step=8, began=1004.0),
    ]


def test_a_recovery_is_traced_from_the_first_sign_to_the_first_step() -> None:
    tracer = RecoveryTracer(RUN)
    told = [tracer.handle(event) for event in recovery_events()]
    assert [bool(spans) for spans in told] == [False] * 4 + [True, False]
    spans = told[4]
    assert {(span.trace_id, span.worker) for span in spans} == {(trace_id(RUN, "1.2", 8), COORDINATOR)}
    assert [(span.name, span.start, span.end) for span in spans] == [
        ("recovery", 1001.5, 1005.0),
        ("detect", 1001.5, 1002.0),
        ("re-form", 1002.0, 1003.0),
        ("copy", 1003.25, 1003.75),
        ("first step", 1003.0, 1005.0),
    ]
    assert [span.parent_id for span in spans] == [None] + [spans[0].span_id] * 4
    assert spans[0].attributes["cause"] == "worker 2 was killed."


def test_a_recovery_that_fails_again_is_part_of_the_next() -> None:
    first, lost, formed, _, step, _ = recovery_events()
    again = WorkerLost(time=1003.5, step=8, worker=1, detect_s=0.0)
    last = GenerationFormed(time=1003.7, generation="1.3", members=MEMBERS[:1], from_step=7)
    tracer = RecoveryTracer(RUN)
    for event in (first, lost, formed, again, last):
        assert not tracer.handle(event)
    assert isinstance(step, StepTraced)
    spans = tracer.handle(replace(step, generation="1.3"))
    assert [span.attributes["of"] for span in spans if span.name == "detect"] == [2, 1]
    assert spans[0].start == 1001.5


def test_nobody_recovers_from_one_that_was_not_at_work() -> None:
    first, lost, formed, _, step, _ = recovery_events()
    assert isinstance(lost, WorkerLost)
    tracer = RecoveryTracer(RUN)
    for event in (first, replace(lost, worker=7), formed, step):
        assert not tracer.handle(event)
