"""Waiting for data: how much of a step it is, when that is worth a word, and the knobs that are named."""

import io
from typing import Any

import pytest

from made_events import fields_of, make_event
from quorate.observe.event import Event
from quorate.observe.events import RunBegan
from quorate.observe.screen import Screen, print_summary
from quorate.observe.waiting import DataWait, DataWaitLog, advice_on_waiting
from quorate.spec.job import JobSpec


def step(number: int, data: Any, compute: float = 0.5, exchange: float = 0.25, apply: float = 0.25) -> Event:
    fields = {"data_s": data, "compute_s": compute, "exchange_s": exchange, "apply_s": apply}
    return make_event("step", number, fields, float(number))


def waited(*events: Event) -> DataWait:
    log = DataWaitLog()
    for event in events:
        log.handle(event)
    return log.wait


def test_waiting_is_held_against_all_phases_of_the_steps() -> None:
    wait = waited(make_event("run"), *(step(number, 1.0) for number in range(1, 4)))
    assert (wait.waited_s, wait.step_s, wait.share) == (2.0, 4.0, 0.5)


def test_another_worker_that_waits_longer_counts_and_never_for_more_than_the_step() -> None:
    def told(number: int, longest: float) -> Event:
        return make_event("step", number, fields_of(step(number, 0.0)) | {"longest_data_s": longest}, float(number))

    assert waited(step(1, 0.0), told(2, 0.25), told(3, 0.0)) == DataWait(0.25, 2.0)
    assert waited(step(1, 0.0), told(2, 7.0)) == DataWait(1.0, 1.0)


def test_the_first_step_of_each_generation_is_left_out() -> None:
    begin = [make_event("generation"), make_event("run"), step(1, 9.0), step(2, 0.0)]
    again = [make_event("generation"), step(3, 9.0), step(4, 0.0)]
    assert waited(*begin, *again) == DataWait(0.0, 2.0)
    assert waited(*begin, *again[1:]) == DataWait(9.0, 12.0)


def test_without_steps_nothing_was_waited_for() -> None:
    assert waited(make_event("run"), step(1, 3.0)).share == 0.0


@pytest.mark.parametrize("odd", [None, "1", True, -1.0, [1]])
def test_what_is_no_duration_counts_as_none(odd: Any) -> None:
    assert waited(step(1, 1.0), step(2, odd)) == DataWait(0.0, 1.0)


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        (DataWait(6.0, 100.0), True),
        (DataWait(5.0, 100.0), False),
        (DataWait(0.9, 1.0), False),
        (DataWait(0.0, 0.0), False),
    ],
)
def test_only_what_is_worth_it_is_told(wait: DataWait, told: bool) -> None:
    assert wait.is_worth_telling == told


LOCAL = {"remote": False, "decode": False, "columns": False, "cache": False, "window_bytes": 10, "memory_bytes": 100}


def told(data: Any = None, workers: int | None = 1, cores: int = 8, **keys: Any) -> str:
    run = make_event("run", fields={"data": data})
    assert isinstance(run, RunBegan)
    return advice_on_waiting(JobSpec(task="a:A", batch_size=8, lanes=4, steps=1, **keys), run.data, workers, cores)


def shards(**facts: Any) -> dict[str, Any]:
    return {"blocks": 3, "window": 8192, "index": "s3://bucket/index.quorate", "reading": LOCAL | facts}


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (told(), "more loader_workers (now 0) may help"),
        (told({"window": "8192"}), "more loader_workers (now 0) may help"),
        (
            told(workers=None, loader_workers=64),
            "more loader_workers (now 64) or a larger loader_prefetch (now 2) may help",
        ),
        # Loaders need cores.
        (told(loader_workers=3), "more loader_workers (now 3) or a larger loader_prefetch (now 2) may help"),
        (
            told(workers=2, loader_workers=3),
            "more cores (all 8 are in use) or a larger loader_prefetch (now 2) may help",
        ),
        (told(workers=2, cores=2), "more cores (all 2 are in use) may help"),
        (told(workers=2, cores=4, threads=2), "more cores (all 4 are in use) may help"),
        # For columns no code of the task runs.
        (told(shards(columns=True), loader_workers=2), "faster storage or more cores may help"),
        (told(shards(columns=True)), "faster storage or more cores may help"),
        # A cache is for what comes from afar or is decoded, and there is only one.
        (told(shards()), "more loader_workers (now 0) may help"),
        (told(shards(remote=True)), "more loader_workers (now 0) or cache= of quorate.Shards may help"),
        (told(shards(decode=True)), "more loader_workers (now 0) or cache= of quorate.Shards may help"),
        (told(shards(decode=True, remote=True, cache=True)), "more loader_workers (now 0) may help"),
        (told(shards(columns=True, remote=True)), "cache= of quorate.Shards may help"),
        # A window is too large where those of a worker's lanes do not fit into its memory.
        (
            told(shards(window_bytes=30)),
            "more loader_workers (now 0) or a smaller window= of quorate.Shards (now 8,192) may help",
        ),
        (told(shards(window_bytes=30), workers=2), "more loader_workers (now 0) may help"),
        (told(shards(window_bytes=300) | {"window": 1}), "more loader_workers (now 0) may help"),
        # Blocks of the task's own are no Shards.
        (told({"blocks": 3, "window": 1}), "more loader_workers (now 0) may help"),
        (
            told({"blocks": 3, "window": 64}),
            "more loader_workers (now 0) or a smaller window of the training set (now 64) may help",
        ),
    ],
)
def test_only_what_can_help_is_named_with_its_present_value(found: str, advice: str) -> None:
    assert found == advice


def test_a_cache_is_not_advised_for_samples_that_are_drawn() -> None:
    log, spec = DataWaitLog(), JobSpec(task="a:A", batch_size=8, lanes=4, steps=1)
    log.handle(make_event("run", None, {"data": shards(decode=True)}))
    assert "cache=" in log.advice(spec, cores=2)
    log.handle(make_event("step", 1, {"draws": True}))
    assert "cache=" not in log.advice(spec, cores=2)
    log.handle(make_event("run", None, {"data": shards(decode=True, remote=True)}))
    assert "cache=" in log.advice(spec, cores=2), "what comes from a store can be kept all the same"


def test_what_is_advised_follows_from_the_events() -> None:
    log, spec = DataWaitLog(), JobSpec(task="a:A", batch_size=8, lanes=4, steps=1)
    log.handle(make_event("generation", None, {"members": [{"worker": 0}, {"worker": 1}]}))
    log.handle(make_event("run", None, {"data": shards(columns=True, remote=True)}))
    assert log.advice(spec, cores=2) == "cache= of quorate.Shards may help"
    log.handle(make_event("run", None, {"data": shards()}))
    assert log.advice(spec, cores=2) == "more cores (all 2 are in use) may help"


def test_the_summary_has_a_line_for_it() -> None:
    stream = io.StringIO()
    waiting = {"share": 0.314, "seconds": 12.0, "advice": told()}
    print_summary({"run": "a-0001", "status": "complete", "waiting_for_data": waiting}, Screen(stream))
    assert "  waiting     for data, 31% of a step: more loader_workers (now 0) may help" in stream.getvalue()
