"""Setups that take long, by the real command: what is said meanwhile, and what `setup_timeout` says."""

import os
import re
import subprocess
import sys

import pytest

from command import PATIENCE, Done, Workplace

SOONER = """
from quorate.cli.main import run
from quorate.supervisor import worker_processes

worker_processes.FIRST_NOTICE = 0.3

if __name__ == "__main__":
    run()
"""


def train(workplace: Workplace, trouble: str, *arguments: str) -> Done:
    """As the command does, but it tells sooner what it waits for."""
    program = workplace.folder / "sooner.py"
    program.write_text(SOONER)
    command = [sys.executable, str(program), "train", "job.yaml", *arguments]
    done = subprocess.run(
        command,
        cwd=workplace.folder,
        env=os.environ | {"TMPDIR": str(workplace.temporary), "TROUBLE": trouble},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    workplace.assert_nobody_left()
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.long
def test_a_setup_that_takes_long_is_told_and_ended_by_setup_timeout_which_names_the_phase(workplace: Workplace) -> None:
    done = train(workplace, "slow datasets", "--workers", "2", "--set", "setup_timeout=15")  # the import counts too
    assert done.code == 1, done.stderr
    assert "workers 0, 1: still in datasets(), " in done.stderr
    assert done.error.startswith("worker 0 (pid ")
    assert re.search(r"is still in datasets\(\), \d+ s after its start\. That is longer than setup_timeout", done.error)
    assert "Raise setup_timeout, or leave it out to wait for as long as it takes." in done.error


def test_a_task_whose_import_takes_long_is_told_and_ended_as_well(workplace: Workplace) -> None:
    done = train(workplace, "slow import", "--set", "setup_timeout=2")
    assert done.code == 1, done.stderr
    assert "the fork server: still in the import of torch and the task, " in done.stderr
    assert re.search(r"the fork server is still in the import of torch and the task, \d+ s after its start", done.error)
