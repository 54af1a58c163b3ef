"""`quorate trace`, of real jobs: whose clocks are wrong, which lose a worker, and which trace nothing."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from quorate.core.spans import covered
from quorate.history.traces import Trace, traces_in
from quorate.lanes.chunks import plan_exchange
from quorate.lanes.hosting import host_lanes
from quorate.observe.events import StepTraced
from quorate.storage.run_folder import RunFolder

LANES, WORKERS = 4, 3
SHIFTS = (0.2, -0.2, 0.0)

# Each worker takes one of the shifts when it builds its model: its clock is wrong by that from then on.
SHIFTED = f"""

class Shifted(Tiny):
    def model(self):
        for number, shift in enumerate({SHIFTS}):
            try:
                Path(f"shift-{{number}}").touch(exist_ok=False)
            except FileExistsError:
                continue
            real = time.time
            time.time = lambda: real() + shift
            break
        return super().model()
"""


def traced(place: Workplace, *arguments: str, **keys: Any) -> list[Trace]:
    """Train with traces; those of the run."""
    place.write_job(**{"workers": WORKERS, "links": "tcp", "track": {"trace": {"every": 3}}, **keys})
    done = place.run(*(arguments or ("train", "job.yaml", "--json")))
    assert done.code == 0, done.stderr
    return traces_in(RunFolder(place.last))


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A job on a ring of three workers whose clocks are wrong."""
    place = Workplace(tmp_path_factory.mktemp("shifted"))
    place.task.write_text(TASK_SOURCE + SHIFTED)
    traced(place, task="task.py:Shifted")
    yield place
    place.clean_up()


@pytest.fixture
def traces(shifted: Workplace) -> list[Trace]:
    return traces_in(RunFolder(shifted.last))


def steps_of(trace: Trace) -> list[StepTraced]:
    return [event for event in trace.told if event.spans[0].name == "step"]


def test_the_first_step_and_one_in_so_many_is_traced_by_every_worker(traces: list[Trace]) -> None:
    assert [trace.step for trace in traces] == [1, 3, 6]
    for trace in traces:
        assert sorted(event.worker for event in steps_of(trace)) == list(range(WORKERS))


def test_every_hop_is_there_at_both_ends(traces: list[Trace]) -> None:
    hosting = host_lanes(LANES, WORKERS)
    planned = Counter(
        (position, (position + 1) % WORKERS, visit.chunk, visit.round + 1)
        for position, visits in enumerate(plan_exchange(hosting))
        for visit in visits
        if visit.sends
    )
    for trace in traces:
        told = {"send": Counter[tuple[int, ...]](), "receive": Counter[tuple[int, ...]]()}
        for span in trace.spans:
            if span.name in told and "chunk" in span.attributes:
                ends = (span.worker, span.attributes["peer"])
                ends = ends if span.name == "send" else ends[::-1]
                told[span.name][(*ends, span.attributes["chunk"], span.attributes["hop"])] += 1
        assert told["send"] == told["receive"] == planned
        sent = {span.span_id for span in trace.spans if span.name == "send"}
        assert {span.cause for span in trace.spans if span.name == "receive"} == sent


def test_the_skew_of_clocks_is_known_to_within_its_uncertainty(traces: list[Trace]) -> None:
    offsets = {event.worker: event for event in steps_of(traces[-1])}.values()
    for event, shift in zip(
        sorted(offsets, key=lambda one: one.clock_offset or 0.0), sorted(SHIFTS)[::-1], strict=True
    ):
        assert event.clock_offset is not None
        assert event.clock_uncertainty is not None
        assert abs(event.clock_offset + shift) <= event.clock_uncertainty + 1e-4  # between two looks at a clock
        assert event.clock_uncertainty < 0.1


def test_no_effect_precedes_its_cause(traces: list[Trace]) -> None:
    for trace in traces:
        by_id = {span.span_id: span for span in trace.spans}
        pairs = [(by_id[span.cause], span) for span in trace.spans if span.cause is not None]
        assert pairs
        assert all(receive.end >= send.start - 1e-9 for send, receive in pairs)
        # Nobody has a step's sum before everybody has begun the step.
        steps = [span for span in trace.spans if span.name == "step"]
        assert max(span.start for span in steps) < min(span.end for span in steps)


def test_spans_account_for_the_time_of_a_step(traces: list[Trace]) -> None:
    for trace in traces:
        for event in steps_of(trace):
            assert covered(event.spans) >= 0.95, f"step {trace.step}, worker {event.worker}"
