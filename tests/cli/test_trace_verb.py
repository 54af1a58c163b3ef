"""`quorate trace`, of real jobs: whose clocks are wrong, which lose a worker, and which trace nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import TASK_SOURCE, Workplace
from quorate.core.spans import covered
from quorate.history.traces import Trace, traces_in
from quorate.observe.seldom_events import StepTraced
from quorate.observe.traces import COORDINATOR
from quorate.storage.run_folder import RunFolder
from schemas import validate

WORKERS = 3
SHIFTS = (0.2, -0.2, 0.0)
DIGITS = 1e-6
"""Seconds: a float that is a time of these days has no more digits."""

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
    # Nobody is lost because the machine is busy: each generation begins with a trace.
    usual = {"workers": WORKERS, "links": "tcp", "failure_timeout": 30.0, "track": {"trace": {"every": 3}}}
    place.write_job(**{**usual, **keys})
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


def test_the_skew_of_clocks_is_known_to_within_its_uncertainty(traces: list[Trace]) -> None:
    offsets = {event.worker: event for event in steps_of(traces[-1])}.values()
    for event, shift in zip(
        sorted(offsets, key=lambda one: one.clock_offset or 0.0), sorted(SHIFTS)[::-1], strict=True
    ):
        assert event.clock_offset is not None
        assert event.clock_uncertainty is not None
        between_two_looks = 1e-3
        assert abs(event.clock_offset + shift) <= event.clock_uncertainty + between_two_looks
        assert event.clock_uncertainty < 0.1


def test_no_effect_precedes_its_cause(traces: list[Trace]) -> None:
    for trace in traces:
        by_id = {span.span_id: span for span in trace.spans}
        pairs = [(by_id[span.cause], span) for span in trace.spans if span.cause is not None]
        assert pairs
        assert all(receive.end >= send.start - DIGITS for send, receive in pairs)
        # Nobody has a step's sum before everybody has begun the step.
        steps = [span for span in trace.spans if span.name == "step"]
        assert max(span.start for span in steps) < min(span.end for span in steps)


def test_spans_account_for_the_time_of_a_step(traces: list[Trace]) -> None:
    told = [event.spans for trace in traces for event in steps_of(trace)]
    # Of all together: one that is taken from its core between two phases, by whatever else runs, is not to count alone.
    accounted = sum(covered(spans) * spans[0].seconds for spans in told)
    assert accounted >= 0.95 * sum(spans[0].seconds for spans in told)


def test_the_checkpoint_of_a_traced_step_is_traced_in_its_parts(traces: list[Trace]) -> None:
    (trace,) = (trace for trace in traces if trace.step == 6)
    saves = {event.worker: [span.name for span in event.spans] for event in trace.told if event.spans[0].name == "save"}
    # What others write is digested before training goes on, what a worker writes itself from its copy.
    assert saves == {
        0: ["save", "copy", "digest", "digest", "write", "commit"],
        1: ["save", "copy", "digest", "digest", "write"],
        2: ["save", "copy", "digest", "digest", "write"],
    }
    phases = {span.name for event in steps_of(trace) for span in event.spans}
    assert {"step", "data", "compute", "forward", "backward", "exchange", "bucket", "apply", "checkpoint"} <= phases


# --- the verb


def test_it_tells_where_the_time_went(shifted: Workplace) -> None:
    done = shifted.run("trace", "last", "--step", "3")
    assert done.code == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title.startswith("step 3 of generation 1.1, trace ")
    assert head.split() == ["worker", "step", "data", "compute", "exchange", "apply", "publish", "rest", "clock"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]


def test_the_document_and_the_file_for_chrome_are_of_the_newest_step(shifted: Workplace) -> None:
    done = shifted.run("trace", "last", "--last", "-o", "out.json", "--json")
    assert done.code == 0, done.stderr
    validate("trace", done.document)
    (trace,) = done.document["traces"]
    assert (trace["step"], len(trace["workers"]), done.document["chrome"]) == (6, WORKERS, "out.json")
    events = json.loads((shifted.folder / "out.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == trace["spans"]
    assert {event["args"].get("trace") for event in events if event["ph"] == "X"} == {trace["trace_id"], None}


def test_a_step_that_was_not_traced_is_named_with_the_nearest_that_was(shifted: Workplace) -> None:
    done = shifted.run("trace", "last", "--step", "5")
    assert done.code == 2
    assert done.error == "step 5 of run tiny-0001 was not traced; the nearest of 3 that were is 6."


def test_step_and_last_are_not_for_the_same(shifted: Workplace) -> None:
    assert shifted.run("trace", "last", "--step", "5", "--last").code == 2


def test_a_file_that_cannot_be_written_is_named(shifted: Workplace) -> None:
    done = shifted.run("trace", "last", "-o", "nowhere/out.json")
    assert done.code == 2
    assert "cannot write nowhere/out.json" in done.error


def test_a_run_without_traces_says_how_to_trace(finished: Path, workplace: Workplace) -> None:
    done = workplace.run("trace", str(finished / "runs" / "tiny-0001"))
    assert done.code == 2
    assert "track: {trace: {every: 100}}" in done.error


def test_a_recovery_is_traced_whatever_step_it_is_at(workplace: Workplace) -> None:
    workplace.write_job()
    assert workplace.train("--json").code == 0
    under = ("chaos", "job.yaml", "--against", "tiny-0001", "--quiet", "--fault", "kill worker 1 at step 4 in exchange")
    traces = traced(workplace, *under, track={"trace": {"every": 1000}})
    recovered = [trace for trace in traces if trace.recovery]
    assert len(recovered) == 1
    (trace,) = recovered
    names = [span.name for span in trace.recovery]
    assert names[:3] == ["recovery", "detect", "re-form"]
    assert names[-1] == "first step"
    root = trace.recovery[0]
    assert "worker 1" in root.attributes["cause"]
    assert all(root.start - DIGITS <= span.start <= span.end <= root.end + DIGITS for span in trace.recovery)
    survivors = {span.worker for span in trace.spans if span.name == "step"}
    assert survivors >= {0, 2}
    assert {span.worker for span in trace.spans if span.name == "join"} >= {0, 2}
    assert COORDINATOR in {span.worker for span in trace.spans}
