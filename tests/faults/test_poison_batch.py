"""Samples that give no loss, skipped while workers die: the same bits, and a ledger that says which."""

from collections.abc import Iterator
from typing import Any

import pytest

from command import Workplace
from faults.test_hostile_code import KEYS, POISONED, TASK
from schemas import validate
from trial import REFERENCE, recovered, told, undisturbed_in

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("unmeasured")]

SKIPPING: dict[str, Any] = KEYS | {
    "steps": 12,
    "workers": 2,
    "on_nonfinite_loss": "skip",
    "checkpoint": {"every": 5, "keep": 3},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROUBLE", "nan")
        with undisturbed_in(tmp_path_factory.mktemp("poison"), TASK, **SKIPPING) as place:
            yield place


def skipped(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {event["step"]: event["skipped"] for event in events if event["kind"] == "step" and "skipped" in event}


def test_the_ledger_lists_what_was_skipped(place: Workplace) -> None:
    found = skipped(place.events(place.folder / "runs" / REFERENCE))
    assert set().union(*(entry["samples"] for entry in found.values())) >= POISONED
    shown = place.run("show", REFERENCE, "--ledger", "--json")
    assert shown.code == 0, shown.stderr
    validate("show", shown.document)
    ledger = shown.document["ledger"]
    assert ledger["whole"]
    assert [step for epoch in ledger["epochs"] for step in epoch["skipped_steps"]] == list(found)
    assert sum(epoch["skipped_samples"] for epoch in ledger["epochs"]) == SKIPPING["batch_size"] * len(found)
    assert f"but for {SKIPPING['batch_size'] * len(found)} skipped" in ledger["verdict"]
    assert "Skipped, since the loss was not finite" in place.run("show", REFERENCE, "--ledger").stdout
    assert place.run("show", REFERENCE).code == place.run("runs").code == 0


@pytest.mark.parametrize("moment", ["exchange", pytest.param("data", marks=pytest.mark.long)])
def test_a_worker_killed_at_a_skipped_step_changes_nothing(place: Workplace, moment: str) -> None:
    reference = skipped(place.events(place.folder / "runs" / REFERENCE))
    step = min(step for step in reference if step > 1)
    document = recovered(place, f"kill worker 1 at step {step} in {moment}")
    assert skipped(told(place, document, "step")) == reference
