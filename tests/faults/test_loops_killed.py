"""Loops as people write them, with workers killed, on several numbers of workers: the digest of one undisturbed one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from docs.test_own_loop_patterns import BEGINNING, PATTERNS
from own_loop import loops_as_written
from trial import recovered, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.usefixtures("unmeasured")]

WRITTEN = Path(loops_as_written.__file__).read_text()
SOURCES = {main.__name__: (WRITTEN, main.__name__, 12) for main in loops_as_written.EQUAL}
SOURCES |= {f"pattern-{number}": (BEGINNING + text, "main", 32) for number, text in enumerate(PATTERNS, 1)}
KEYS: dict[str, Any] = {"steps": None, "lanes": 4, "epochs": 3, "workers": 1, "checkpoint": {"every": 2, "keep": 20}}
FAULTS = ["kill worker 1 at step 4 in forward", "kill worker 0 at step 9 in exchange"]


@pytest.fixture(scope="module", params=SOURCES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    source, name, batch_size = SOURCES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    with undisturbed_in(folder, source, task=f"task.py:{name}", batch_size=batch_size, **KEYS) as place:
        yield place


@pytest.mark.parametrize("workers", [2, 4])
def test_killed_workers_leave_the_bits_as_they_are(place: Workplace, workers: int) -> None:
    recovered(place, *FAULTS, settings=(f"workers={workers}",))


def test_a_run_that_ended_within_an_epoch_goes_on_with_another_number_of_workers(place: Workplace) -> None:
    whole = json.loads((place.runs()[0] / "result.json").read_text())
    for command in (
        ("train", "job.yaml", "--workers", "2", "--set", "epochs=null", "--set", "steps=7"),
        ("resume", "last", "--workers", "3", "--set", f"steps={whole['steps']}"),
    ):
        done = place.run(*command, "--quiet")
        assert done.code == 0, done.stderr
    assert place.result()["steps"] == whole["steps"]
    assert place.result()["weights_digest"] == whole["weights_digest"]
