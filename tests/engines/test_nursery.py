import json
import os
import re
import subprocess
import sys

from command import PATIENCE, Workplace


def test_a_task_that_starts_a_thread_is_spawned_to_the_same_bits_and_nothing_in_the_folder_shadows(
    workplace: Workplace, undisturbed: str
) -> None:
    # Modules that every process of a job imports. The command itself, as installed, does not look for them here.
    for name in ("json", "socket", "signal", "logging"):
        (workplace.folder / f"{name}.py").write_text("raise SystemExit('a file of the working directory was imported')")
    command = [sys.executable, "-P", "-m", "quorate", "train", "job.yaml", "--workers", "2", "--json"]
    environment = {**os.environ, "TROUBLE": "thread"}
    spawned = subprocess.run(
        command, cwd=workplace.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    workplace.assert_nobody_left()
    assert spawned.returncode == 0, spawned.stderr
    assert json.loads(spawned.stdout)["weights_digest"] == undisturbed
    log = workplace.log("nursery")
    for worker in range(2):
        pattern = rf"worker {worker} is process \d+, spawned: importing the task started a thread, which a fork would"
        assert re.search(pattern, log)
        assert "a word from the task" in workplace.log(f"worker-{worker}")
