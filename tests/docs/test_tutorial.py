"""What the pages promise of equal bits holds for the commands that they show."""

import shlex

import pytest

from command import Workplace
from docs.blocks import blocks_of

TUTORIAL = "docs/tutorial/README.md"


def typed(workplace: Workplace, command: str) -> str:
    """What a command of a page prints; it succeeds."""
    done = workplace.run(*shlex.split(command)[1:])
    assert done.code == 0, done.stderr
    return " ".join(done.stdout.split())


def test_a_run_that_is_made_longer_equals_one_of_that_length(workplace: Workplace) -> None:
    commands = [line for block in blocks_of(TUTORIAL) for line in block.commands]
    own = [line for line in commands if "mine" in line or line.startswith("quorate resume last --epochs")]
    *before, compared = own
    assert compared == "quorate diff mine-0001 mine-0002"
    assert sum("--epochs" in line for line in before) == 3
    for line in before:
        typed(workplace, line)
    assert "They end with the same weights." in typed(workplace, compared)


@pytest.mark.long
def test_two_runs_that_part_by_the_length_of_their_schedule_say_so(workplace: Workplace) -> None:
    typed(workplace, "quorate init mine")
    for line in ("train mine/job.yaml --epochs 1", "resume last --epochs 2", "train mine/job.yaml --epochs 2"):
        rate = "--set schedule.kind=cosine" if line.startswith("train") else ""
        typed(workplace, f"quorate {line} {rate}")
    told = typed(workplace, "quorate diff mine-0001 mine-0002")
    assert "They end with other weights." in told
    assert "depends on the length of the job: mine-0001 was laid out for" in told
    assert "twice as long" not in typed(workplace, "quorate show last")
