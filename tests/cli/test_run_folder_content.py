import json
import re

import pytest

from command import Workplace, await_condition, command_line


@pytest.mark.usefixtures("unmeasured")
def test_a_run_explains_itself_and_keeps_its_secret(workplace: Workplace, undisturbed: str) -> None:
    settings = ("--set", "checkpoint.keep=2", "--set", "loader_workers=1")
    running = workplace.start("train", "job.yaml", "--workers", "3", "--json", *settings, HOLD="1")
    running.await_event("generation")
    address = workplace.last / "coordinator.json"
    assert address.stat().st_mode & 0o777 == 0o600
    token = json.loads(address.read_text())["token"]
    commands = [command_line(pid) for pid in workplace.pids()]
    names = ("coordinator", "fork server", *(f"worker {worker}{of}" for worker in range(3) for of in ("", " loader")))
    titles = {f"quorate: {name} of tiny-0001" for name in names}
    await_condition("titles", lambda: titles <= {command_line(pid).rstrip() for pid in workplace.pids()})
    workplace.go()
    done = running.done()
    assert done.code == 0, done.stderr

    document = done.document
    assert document["weights_digest"] == undisturbed
    assert {"run", "status", "steps", "samples_per_second", "wall_seconds", "final_metrics"} <= document.keys()
    assert (document["run"], document["status"], document["steps"]) == ("tiny-0001", "complete", 8)
    assert (document["recoveries"], document["final_metrics"].keys()) == ([], {"loss"})
    assert workplace.result() == document

    run = workplace.last
    assert run.stat().st_mode & 0o777 == 0o700
    job = (run / "job.yaml").read_text()
    assert re.search(r"^lanes: 4  # job\.yaml line \d+$", job, re.MULTILINE)
    assert re.search(r"^workers: 3  # --workers$", job, re.MULTILINE)
    assert re.search(r"^  keep: 2  # --set checkpoint\.keep", job, re.MULTILINE)
    environment = json.loads((run / "environment.json").read_text())
    assert {"torch", "python", "task source", "threads"} <= environment.keys()
    events = workplace.events()
    kinds = [event["kind"] for event in events]
    assert (kinds[0], kinds[-1]) == ("generation", "finished")
    assert {"run", "generation", "step", "evaluation", "checkpoint", "finished"} == set(kinds)
    assert [member["lanes"] for member in events[0]["members"]] == [[0, 1], [2], [3]]
    begun = events[kinds.index("run")]
    assert (begun["from_step"], begun["total_steps"], begun["lanes"]) == (0, 8, 4)
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, 9))
    assert len(workplace.checkpoints()) == 2
    assert not address.exists()

    assert "does not answer" not in workplace.log("launcher")
    for worker in range(3):
        assert "a word from the task" in workplace.log(f"worker-{worker}")
    forked = re.findall(r"worker \d is process \d+, forked$", workplace.log("fork_server"), re.MULTILINE)
    assert len(forked) == 3, "a task without threads of its own is forked"
    assert {"coordinator.jsonl", "fork_server.jsonl", "launcher.jsonl", "worker-0.jsonl"} <= {
        file.name for file in (run / "logs").iterdir()
    }
    for file in (file for file in run.rglob("*") if file.is_file()):
        assert token.encode() not in file.read_bytes(), f"the token stands in {file}"
    assert len(commands) >= 3
    assert not [command for command in commands if token in command]
    assert token not in done.stderr + done.stdout


def test_a_run_is_shared_with_the_group_on_request(workplace: Workplace, undisturbed: str) -> None:
    done = workplace.train("--json", "--set", "share=group")
    assert done.document["weights_digest"] == undisturbed
    assert workplace.last.stat().st_mode & 0o777 == 0o750


def test_more_workers_than_cores_are_warned_of(workplace: Workplace) -> None:
    workplace.write_job(lanes=400, batch_size=400, task="task.py:NotATask")
    done = workplace.train("--workers", "300", "--set", "threads=2")
    assert done.code == 2
    assert "NotATask in" in done.error
    assert "is a class but not a task. Its tasks: " in done.error
    assert "WARNING: 300 workers × 2 threads = 600, more than the" in done.stderr
