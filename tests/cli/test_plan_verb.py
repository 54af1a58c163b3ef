from typing import Any

import pytest

from command import Workplace
from quorate.api.plan import parse_memory
from quorate.core.errors import RequestError
from schemas import validate

PRINTED = "a word from the task\n"


def planned(workplace: Workplace, *arguments: str) -> dict[str, Any]:
    done = workplace.run("plan", "job.yaml", "--json", *arguments)
    assert (done.code, done.stderr.replace(PRINTED, "")) == (0, "")
    document: dict[str, Any] = done.document
    validate("plan", document)
    assert document["memory"]["bytes"] == sum(part["bytes"] for part in document["memory"]["parts"])
    return document


def test_a_job_is_planned_and_nothing_is_trained(workplace: Workplace) -> None:
    document = planned(workplace, "--workers", "2")
    assert document["memory"]["fits"]
    assert document["advice"] == []
    assert document["communication"]["workers"][0]["sends_bytes"] > 0
    assert not (workplace.folder / "runs").exists()
    done = workplace.run("plan", "job.yaml")
    assert (done.code, done.stderr) == (0, PRINTED)
    assert "verdict      fits" in done.stdout


def test_what_does_not_fit_comes_with_what_to_change_and_that_helps(workplace: Workplace) -> None:
    whole = planned(workplace, "--memory", "80GB", "--set", "batch_size=4096")
    growing = {part["name"]: part["bytes"] for part in whole["memory"]["parts"]}
    need, activations = whole["memory"]["bytes"], growing["activations"]
    # Room for all but half of the activations.
    memory = str(int((need - activations / 2) / 0.9))
    small = planned(workplace, "--memory", memory, "--set", "batch_size=4096")
    assert not small["memory"]["fits"]
    accumulate = next(line for line in small["advice"] if line.startswith("accumulate: ")).split()[1]
    again = planned(workplace, "--memory", memory, "--set", "batch_size=4096", "--set", f"accumulate={accumulate}")
    assert again["memory"]["fits"]


def test_a_job_that_is_sharded_says_how(workplace: Workplace) -> None:
    mesh = ("--workers", "4", "--set", "strategy={kind: fsdp, shard: 2, replicate: 2}")
    document = planned(workplace, *mesh)
    assert {key: document["spread"][key] for key in ("replicate", "shard", "tensor")} == {
        "replicate": 2,
        "shard": 2,
        "tensor": 1,
    }
    assert len(document["communication"]["workers"]) == 4
    assert planned(workplace, "--workers", "2")["spread"] is None
    done = workplace.run("plan", "job.yaml", *mesh)
    assert "2 replicas × 2 shards × 1 across: 4 workers, of which 4 read data of their own" in done.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("80 gib", 80 * 2**30), ("512M", 512 * 10**6), ("1.5TB", 15 * 10**11), ("7", 7)],
)
def test_memory_is_written_as_people_write_it(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0GB", "80XB", "5i"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="for example 80GB"):
        parse_memory(text)
