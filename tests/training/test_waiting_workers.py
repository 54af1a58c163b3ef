"""Waiting for data is told of the worker that waits most, whoever tells the steps."""

import time
from pathlib import Path
from typing import Any

import pytest

import gang
from bits.bit_tasks import Regression
from quorate.observe.event import Event
from quorate.observe.events import read_event
from quorate.observe.waiting import DataWaitLog

PAUSE = 0.2


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_worker_that_waits_for_data_is_seen_by_whoever_tells_the_steps(slow: int, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"

    def attach(position: int, loop: Any) -> None:
        assert loop.feed._check == loop.check_lease, "whoever waits hears of the end of its generation"
        if position == slow:
            give = loop.feed.next

            def give_late(request: Any) -> Any:
                time.sleep(PAUSE)
                return give(request)

            loop.feed.next = give_late
        if position == 0:
            publish = loop.publish

            def keep(event: Event) -> None:
                publish(event)
                with file.open("a") as stream:
                    stream.write(event.to_json() + "\n")

            loop.publish = keep

    ended = gang.train(Regression, gang.job(Regression, lanes=3, steps=4), 3, tmp_path, sabotage=attach)
    assert ended.ending == "complete"
    log = DataWaitLog()
    for line in file.read_text().splitlines():
        log.handle(read_event(line))
    # Whoever tells the steps may have begun one later than the worker that waits: by so much it has seen less of it.
    assert log.wait.waited_s >= 2 * PAUSE
    assert log.wait.share > 0
