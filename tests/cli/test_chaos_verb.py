"""`quorate chaos`: a job under faults, by the real command. Each phase in which a worker can die is in `faults`."""

import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from command import Workplace
from schemas import validate
from trial import REFERENCE, assert_recovered, chaos, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

KEYS: dict[str, Any] = {"steps": 24, "workers": 2, "evaluate": {"every": 6}, "checkpoint": {"every": 8, "keep": 3}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder in which the job has run undisturbed, once for all tests here; their runs are added to it."""
    with undisturbed_in(tmp_path_factory.mktemp("chaos"), **KEYS) as place:
        yield place


def generations(place: Workplace, document: dict[str, Any]) -> list[dict[str, Any]]:
    return told(place, document, "generation")


@pytest.mark.long
def test_a_worker_stopped_for_a_moment_goes_on_as_if_nothing_had_been(place: Workplace) -> None:
    document = chaos(place, "stop worker 0 at step 5 in forward for 300ms")
    assert (document["same"], document["faults"][0]["fired"], document["recoveries"]) == (True, True, [])
    assert len(generations(place, document)) == 1


@pytest.mark.long
def test_random_faults_are_the_same_each_time_and_change_nothing(place: Workplace) -> None:
    documents = []
    for _ in range(2):
        done = place.run(
            *(
                "chaos",
                "job.yaml",
                "--against",
                REFERENCE,
                "-q",
                "--json",
                "--random",
                "--mtbf",
                "8steps",
                "--seed",
                "3",
            )
        )
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"
        assert_recovered(place, done.document)
        documents.append(done.document)
    assert len({json.dumps([fault["fault"] for fault in document["faults"]]) for document in documents}) == 1


@pytest.mark.long
def test_without_a_run_to_compare_with_both_are_made_and_people_are_told(workplace: Workplace) -> None:
    workplace.write_job(**KEYS)
    script = workplace.folder / "faults.txt"
    script.write_text("# the only one\nkill worker 1 at step 3 in forward\n\n")
    done = workplace.run("chaos", "job.yaml", "--script", "faults.txt")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert [run.name for run in workplace.runs()] == ["tiny-0001", "tiny-0002"]
    assert "  kill worker 1 at step 3 in forward  fired: worker 1 at step 3 in forward\n" in done.stdout
    assert "tiny-0001, undisturbed" in done.stdout
    assert "tiny-0002, under faults" in done.stdout
    assert done.stdout.endswith("same: the faults have not changed a bit\n")
    assert len(set(re.findall("[0-9a-f]{64}", done.stdout))) == 1


@pytest.mark.long
def test_a_fault_that_does_not_come_about_is_told_and_is_no_success(place: Workplace) -> None:
    document = chaos(place, "kill worker 1 at step 24 in join", code=1)
    assert document["faults"] == [{"fault": "kill worker 1 at step 24 in join", "fired": False, "firings": []}]
    assert document["same"]
    done = place.run("chaos", "job.yaml", "--against", REFERENCE, "-q", "--fault", "kill worker 1 at step 24 in join")
    assert done.code == 1
    assert "not fired" in done.stdout
    assert "same weights, but one of the faults did not happen" in done.stdout


@pytest.mark.long
def test_other_bits_are_told(place: Workplace) -> None:
    """The task itself is made to give other weights after a fault: what the verb is for must be able to show."""
    source = place.task.read_text()
    other = "inputs, targets = batch\n        time.sleep(PAUSE)"
    assert other in source
    fired = "Path('runs').glob('*/logs/*.fired')"
    spoiled = f"inputs, targets = batch\n        inputs = inputs * (2 if len(list({fired})) > KNOWN else 1)"
    known = len(list(place.folder.glob("runs/*/logs/*.fired")))
    try:
        place.task.write_text(source.replace(other, spoiled) + f"\n\nKNOWN = {known}\n")
        document = chaos(place, "kill worker 1 at step 10", code=1)
        assert not document["same"]
        assert document["differing_facts"] == ["task source"]
        assert document["digest"] != document["undisturbed_digest"]
        done = place.run("chaos", "job.yaml", "--against", REFERENCE, "-q", "--fault", "kill worker 1 at step 10")
        assert done.code == 1
        assert "DIFFERENT: the faults have changed the weights" in done.stdout
    finally:
        place.task.write_text(source)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--fault", "kil all at step 2"],
            "--fault: `kil all at step 2` is not understood; a fault is written such as `kill all at step 40`",
        ),
        (["--fault", "kill worker 2 at step 2"], "there is no worker 2; the job runs on workers 0 to 1"),
        (
            ["--fault", "kill all at step 1", "--against", REFERENCE, "--set", "seed=4"],
            f"run {REFERENCE} is not a run of this job: seed: 0 → 4. Name a run of the same job",
        ),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_trained(
    place: Workplace, arguments: list[str], why: str
) -> None:
    runs = place.runs()
    done = place.run("chaos", "job.yaml", "--json", *arguments)
    assert done.code == 2
    assert why in done.error
    validate("error", done.document)
    assert place.runs() == runs


@pytest.mark.long
def test_an_interrupted_trial_says_so(workplace: Workplace) -> None:
    workplace.write_job(**KEYS | {"steps": 1000})
    running = workplace.start("chaos", "job.yaml", "--json", "-q", "--fault", "kill all at step 900", PAUSE="0.02")
    running.await_event("step", at_least=2)
    running.process.send_signal(signal.SIGINT)
    done = running.done()
    assert done.code == 130
    validate("error", done.document)
    workplace.assert_nobody_left()
