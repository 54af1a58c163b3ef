"""Jobs on shards under faults: on one worker, three and two, killed in between, they read each sample once an epoch."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, await_condition, parent_of
from quorate.history.ledger import read_ledger
from quorate.storage.run_folder import RunFolder
from streamed_job import EPOCHS, SOURCE, STEPS_AN_EPOCH, Played, assert_whole, begun_at, keys_of, write_data
from streamed_task import Streamed
from training.recorded import Run, run
from trial import chaos, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

SLOWLY = "0.02"  # seconds a lane: a save is done before the next kill
long = pytest.mark.long


@contextmanager
def streamed_in(folder: Path, kind: str, **keys: Any) -> Iterator[Workplace]:
    """A folder in which a job on shards has run undisturbed, on one worker."""
    write_data(kind, folder)
    with undisturbed_in(folder, SOURCE, **keys_of(kind, **keys)) as place:
        yield place


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Workplace]]:
    """Such a folder for each kind, made when it is first asked for."""
    with _Places(tmp_path_factory) as found:
        yield found


class _Places(dict[str, Workplace]):
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders
        self._open: list[Any] = []

    def __missing__(self, kind: str) -> Workplace:
        opened = streamed_in(self._folders.mktemp(f"streamed-{kind}"), kind)
        self[kind] = opened.__enter__()
        self._open.append(opened)
        return self[kind]

    def __enter__(self) -> "_Places":
        return self

    def __exit__(self, *error: object) -> None:
        for opened in self._open:
            opened.__exit__(None, None, None)


def digest_of(place: Workplace) -> str:
    """Of the undisturbed run."""
    digest: str = json.loads((place.runs()[0] / "result.json").read_text())["weights_digest"]
    return digest


def assert_as_undisturbed(place: Workplace) -> None:
    assert place.result()["status"] == "complete"
    assert place.result()["weights_digest"] == digest_of(place)
    assert_whole(place)
    alone, newest = (ledgers(place, run) for run in (place.runs()[0], place.last))
    assert newest == alone, "each step has read what it reads undisturbed"


def ledgers(place: Workplace, run: Path) -> dict[int, str]:
    """What each step has read; one that is told again must have read the same."""
    steps: dict[int, str] = {}
    for event in place.events(run):
        if event["kind"] == "step":
            assert steps.setdefault(event["step"], event["ledger"]) == event["ledger"]
    return steps


def assert_went_on_within_epochs(place: Workplace, parts: int) -> None:
    resumed = begun_at(place)[1:]
    assert len(resumed) >= parts - 1
    assert [step for step in resumed if step % STEPS_AN_EPOCH == 0] == [], "each in the middle of an epoch"


FAULTS = {
    # Of each part: killed while blocks are on their way, while the lanes exchange, and with what keeps them together.
    1: ["kill launcher at step 5 in {first}"],
    3: [
        "kill worker 1 at step 6 in data after 1ms",
        "kill worker 2 at step 9 in exchange",
        "kill worker 0 at step 10 in evaluation",
        "kill coordinator at step 12 in data",
        "kill launcher at step 15 in {second}",
    ],
    2: ["kill worker 0 at step 17 in data", "kill worker 1 at step 18 in copy", "kill all at step 21 in apply"],
}


@long
@pytest.mark.parametrize(
    ("kind", "loaders", "first", "second"),
    [
        ("parquet", 0, "data", "apply"),
        ("parquet", 1, "exchange", "data"),
        ("tar", 0, "apply", "exchange"),
        ("tar", 1, "data", "forward"),
        ("jsonl", 0, "forward", "data"),
        ("jsonl", 1, "exchange", "exchange"),
    ],
)
def test_resumed_on_one_three_and_two_workers_with_kills_in_each_part(
    places: dict[str, Workplace], kind: str, loaders: int, first: str, second: str
) -> None:
    place = places[kind]
    played = Played(place, PAUSE=SLOWLY)
    for workers, faults in FAULTS.items():
        script = [fault.format(first=first, second=second) for fault in faults]
        done = played.part(*script, workers=workers, settings=[f"loader_workers={loaders}"])
        assert done.code == (0 if workers == 2 else -signal.SIGKILL), done.stderr
        assert played.missed == []
    assert_went_on_within_epochs(place, parts=3)
    assert_as_undisturbed(place)


@pytest.mark.long
def test_killed_on_one_worker_and_resumed_on_three_and_two_with_a_kill_on_each(tmp_path: Path) -> None:
    """The quick one: beside the same job in this process, and judged by what its folder holds."""
    (tmp_path / "job").mkdir()
    write_data("parquet", tmp_path / "job")
    place = Workplace(tmp_path / "job")
    place.task.write_text(SOURCE)
    place.write_job(**keys_of("parquet"))
    try:
        played = Played(place, PAUSE="0.01")
        # Four calls a step: in the fourth there is a checkpoint, and nobody lives on beyond the fifth.
        held = {"SAVED_BY": "13", "STAYS_IN": "17"}
        assert played.part("kill launcher at step 5", workers=1, **held).code == -signal.SIGKILL
        faults = ("kill worker 1 at step 7 in data", "remove worker at step 13", "kill worker 0 at step 17 in exchange")
        done = played.part(*faults, workers=3)
        assert done.code == 0, done.stderr
        assert played.missed == []
        assert_went_on_within_epochs(place, parts=2)
        assert [event["workers"] for event in place.events() if event["kind"] == "resize"] == [2]
        assert place.result()["weights_digest"] == undisturbed_here(place).ended.digest
        ledger = read_ledger(RunFolder(place.last))
        assert (ledger.is_whole, ledger.unplanned) == (True, ""), ledger.verdict
        assert [entry.status.value for entry in ledger.epochs] == ["whole"] * EPOCHS
    finally:
        place.clean_up()
        place.assert_nobody_left()


def undisturbed_here(place: Workplace) -> Run:
    """The same job on one worker that is forked from this process, which takes a fraction of the time."""
    keys = json.loads(place.job.read_text())
    places = {name: str(place.folder / folder) for name, folder in (("place", "train"), ("validation", "validation"))}
    given = {key: value for key, value in keys.items() if key not in ("task", "workers", "name", "params")}
    return run(Streamed, place.folder / "here", 1, params=keys["params"] | places, **given)


@long
@pytest.mark.parametrize("loaders", ["0", "1"])
@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_one_run_that_grows_to_three_workers_and_shrinks_to_two(
    places: dict[str, Workplace], kind: str, loaders: str
) -> None:
    place = places[kind]
    faults = (
        "add worker at step 3",
        "add worker at step 5",
        "kill worker 2 at step 8 in data",
        "kill coordinator at step 10 in exchange",
        "remove worker at step 13",
        "kill worker 0 at step 18 in data after 1ms",
    )
    settings = ("workers=1", f"loader_workers={loaders}")
    document = chaos(place, *faults, settings=settings, PAUSE=SLOWLY)
    assert [fault["fault"] for fault in document["faults"] if not fault["fired"]] == []
    assert document["same"] and document["ledger_whole"]
    resizes = [(event["before"], event["workers"]) for event in told(place, document, "resize")]
    assert resizes == [(1, 2), (2, 3), (3, 2)]
    assert_as_undisturbed(place)


@long
@pytest.mark.parametrize("phase", ["data", "evaluation", "checkpoint", "join"])
def test_a_coordinator_killed_in_a_phase(places: dict[str, Workplace], phase: str) -> None:
    place = places["jsonl"]
    fault = f"kill coordinator at step {1 if phase == 'join' else 7} in {phase}"
    document = chaos(place, fault, settings=("workers=2",))
    assert [each["fired"] for each in document["faults"]] == [True]
    assert document["recoveries"] == []
    assert_as_undisturbed(place)


# --- a loader that dies


def loaders_of(place: Workplace) -> list[int]:
    """The loader processes: children of workers, which are children of the fork server."""
    family = place.workers()
    return [pid for pid in family if parent_of(pid) in family]


@long
@pytest.mark.parametrize("kind", ["tar", "jsonl"])  # columns are put together by threads
def test_a_loader_that_is_killed_costs_a_generation(places: dict[str, Workplace], kind: str) -> None:
    place = places[kind]
    hold = place.folder / "hold"
    running = place.start(
        "train", "job.yaml", "--json", "--workers", "2", "--set", "loader_workers=1", PAUSE=SLOWLY, KEPT_BYTES="2000"
    )
    running.await_event("checkpoint", at_least=2)
    try:
        hold.touch()
        (first, *_), count = await_condition("the loaders", lambda: loaders_of(place)), len(loaders_of(place))
        assert count == 2, "one of each worker"
        os.kill(first, signal.SIGKILL)
    finally:
        hold.unlink(missing_ok=True)
    done = running.done()
    place.assert_nobody_left()
    assert done.code == 0, done.stderr
    (loss,) = [event for event in place.events() if event["kind"] == "lost"]
    assert f"its loader process {first} was killed by SIGKILL" in loss["message"]
    assert_as_undisturbed(place)
