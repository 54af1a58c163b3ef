"""A job that has run undisturbed, and is run again under faults: what has to hold of every such trial."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, await_condition
from schemas import validate

REFERENCE = "tiny-0001"


def undisturbed_job(source: str | None = None, **keys: Any) -> Any:
    """A fixture: for the tests of a module, a folder in which the job has run undisturbed."""

    @pytest.fixture(scope="module")
    def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
        with undisturbed_in(tmp_path_factory.mktemp("job"), source, **keys) as found:
            yield found

    return place


@contextmanager
def undisturbed_in(folder: Path, source: str | None = None, **keys: Any) -> Iterator[Workplace]:
    """A folder in which the job has run undisturbed; runs under faults are added to it."""
    place = Workplace(folder)
    if source is not None:
        place.task.write_text(source)
    place.write_job(**keys)
    done = place.train("--json")
    assert done.code == 0, done.stderr
    yield place
    place.clean_up()
    place.assert_nobody_left()


def chaos(
    place: Workplace, *faults: str, code: int = 0, settings: tuple[str, ...] = (), **environment: str
) -> dict[str, Any]:
    """Run the job under faults; the document, which has to fit its schema."""
    given = [word for fault in faults for word in ("--fault", fault)]
    changed = [word for setting in settings for word in ("--set", setting)]
    done = place.run("chaos", "job.yaml", "--against", REFERENCE, "--quiet", "--json", *given, *changed, **environment)
    assert done.code == code, f"{done.stdout}\n{done.stderr}"
    validate("chaos", done.document)
    assert "Warning" not in done.stderr, "nothing that is for developers reaches a user"
    return done.document


@contextmanager
def held_until_saved(place: Workplace, step: int) -> Iterator[None]:
    """Let the losses that HOLD holds go on as soon as the next run has told that its checkpoint of this step is
    committed."""
    run_before, over = place.last, threading.Event()

    def is_saved() -> bool:
        saved = [event["step"] for event in place.events() if event["kind"] == "checkpoint"]
        return over.is_set() or (place.last != run_before and step in saved)

    def go_on() -> None:
        await_condition("the checkpoint", is_saved)
        place.go()

    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(go_on)
        try:
            yield
        finally:
            over.set()
            going.result()
            (place.folder / "go").unlink()


def told(place: Workplace, document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The events of one kind of a run under faults."""
    return [event for event in place.events(place.folder / "runs" / document["run"]) if event["kind"] == kind]


def assert_replicas_sufficed(place: Workplace, document: dict[str, Any]) -> None:
    """Nobody went back to a checkpoint, unless a server was lost while another was still on its way: the machine may be
    slow, and then nobody else has what it held."""
    all_servers, present = 0, set[int]()
    for event in place.events(place.folder / "runs" / document["run"]):
        if event["kind"] == "generation":
            present = set(event["servers"] or ())
            all_servers = max(all_servers, len(present))
        elif event["kind"] == "lost" and event["worker"] in present:
            if len(present) < all_servers:
                return
            present.discard(event["worker"])
    assert not told(place, document, "rollback")


def assert_recovered(place: Workplace, document: dict[str, Any]) -> None:
    """Every fault came about, there was something to recover from, and it has not changed a bit."""
    assert [fault["fired"] for fault in document["faults"]] == [True] * len(document["faults"])
    assert len(told(place, document, "generation")) > 1
    assert document["same"]
    assert document["digest"] == document["undisturbed_digest"]
    assert document["steps"] == max(event["step"] for event in told(place, document, "step"))
    assert document["recoveries"]
    steps = {event["step"] for event in told(place, document, "step")}
    assert steps == set(range(1, document["steps"] + 1)), "every step is told"


def recovered(place: Workplace, *faults: str, settings: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """Run the job under faults from which it recovers, to the same bits."""
    document = chaos(place, *faults, code=0, settings=settings, **environment)
    assert_recovered(place, document)
    return document


def recovered_forwards(
    place: Workplace, *faults: str, settings: tuple[str, ...] = (), **environment: str
) -> dict[str, Any]:
    """The same where somebody always has what a lost worker held: no checkpoint is needed, and no step done again but
    one that only somebody had completed who died before it could give it away."""
    document = recovered(place, *faults, settings=settings, **environment)
    begun = [event["from_step"] for event in told(place, document, "generation")]
    assert all(later >= earlier - 1 for earlier, later in pairwise(begun)), begun
    assert not told(place, document, "rollback")
    return document


def assert_runs_end_alike(place: Workplace) -> None:
    """The newest run has the weights of the undisturbed one."""
    digests = {json.loads((run / "result.json").read_text())["weights_digest"] for run in (place.runs()[0], place.last)}
    assert len(digests) == 1


def firings(document: dict[str, Any], fault: str) -> list[tuple[int, str]]:
    """At which steps and in which phases the faults of this wording came about."""
    return [
        (firing["step"], firing["phase"])
        for told in document["faults"]
        if told["fault"] == fault
        for firing in told["firings"]
    ]
