"""A job that grows by itself, by the real command: as far as that pays, with the reason of each change, and to the same
bits."""

import pytest

from command import Workplace, await_condition, workplace  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("unmeasured")]


def test_a_worker_that_does_too_little_is_given_back(workplace: Workplace) -> None:  # noqa: F811
    # With the second worker every lane takes ten times as long: more than how busy the machine is could hide.
    workplace.write_job(lanes=3, batch_size=6, steps=600, workers=3)
    reference = workplace.train("--workers", "1", "--json").document["weights_digest"]
    grow = "engine={kind: local, grow: {efficiency: 0.9, steps: 3}}"
    running = workplace.start("train", "job.yaml", "--json", "--set", grow, SLOW="0.02")
    running.await_event("step", at_least=1)

    def resizes() -> list[dict[str, object]]:
        return [event for event in workplace.events() if event["kind"] == "resize"]

    await_condition("the worker that is tried", lambda: resizes() or None)
    (workplace.folder / "slower").touch()
    await_condition("the worker that is given back", lambda: len(resizes()) == 2 or None)
    workplace.go()
    document = running.done().document
    tried, given_back = resizes()
    assert (tried["before"], tried["workers"]) == (1, 2)
    assert str(tried["reason"]).startswith("one more is tried: 1 worker computes")
    assert (given_back["before"], given_back["workers"]) == (2, 1)
    assert str(given_back["reason"]).startswith("2 workers compute")
    assert (document["weights_digest"], document["recoveries"]) == (reference, [])
