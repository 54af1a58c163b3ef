import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from command import PATIENCE, Workplace, await_condition
from quorate.core.processes import adopt_orphans, ask_child, children_of
from quorate.engines.fork_server import ForkServer, Messages, _Child


@pytest.mark.long
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
    log = workplace.log("fork_server")
    for worker in range(2):
        pattern = rf"worker {worker} is process \d+, spawned: importing the task started a thread, which a fork would"
        assert re.search(pattern, log)
        assert "a word from the task" in workplace.log(f"worker-{worker}")


def test_what_a_worker_that_lives_on_has_left_is_reaped_when_it_ends_and_not_before() -> None:
    def adopt() -> str:
        adopt_orphans()
        fork_server = ForkServer(Messages(socket.socketpair()[0]))
        worker = _start_one_that_leaves_two()
        fork_server._watch(_Child(0, worker))
        await_condition("its children", lambda: len(children_of(os.getpid())) == 3)
        await_condition("the end of one", lambda: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        fork_server._reap_left()
        left = children_of(os.getpid()).keys() - {worker}
        for pid in (worker, *left):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        fork_server._reap_left()
        return f"{len(left)} left"

    assert ask_child(adopt, seconds=60).text == "1 left"


def _start_one_that_leaves_two() -> int:
    """Of which one ends at once."""
    worker = os.fork()
    if worker == 0:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            if os.fork() == 0:
                signal.pause()
            os._exit(0)
        os.wait()
        signal.pause()
    return worker
