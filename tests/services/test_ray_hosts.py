"""Jobs on a Ray cluster whose hosts are cut off, and whose head is killed: the same bits, and never two that go on."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command import await_condition
from services.ray_hosts import PATIENCE, RayHosts

# Cold: what is forked from a warm interpreter would be on that one's host.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("namespaces_allowed", "cold"),
]

TASK = Path(__file__).with_name("ray_task.py")
STEPS = 300
CUT = 20.0
"""Seconds: longer than a `failure_timeout`, shorter than it takes Ray to call a node dead."""


class Job:
    """A job whose launcher is on one of the hosts."""

    def __init__(self, folder: Path, hosts: RayHosts, place: int) -> None:
        self.folder = folder
        self._hosts = hosts
        self._place = place
        self.go = folder / "go"
        (folder / "job.yaml").write_text(
            f"version: 2\nname: small\ntask: {TASK}:Small\nlanes: 3\nbatch_size: 12\nsteps: {STEPS}\nseed: 5\n"
            f"failure_timeout: 3\nruns: {folder}/runs\ncheckpoint: {{every: 5}}\n"
        )
        self._process: subprocess.Popen[str] | None = None

    def undisturbed(self) -> str:
        """The digest of the job on one machine."""
        return str(self._result(self._train("--set", f"runs={self.folder}/undisturbed"))["weights_digest"])

    def begin(self) -> None:
        """Train on two hosts, slowly until `go` is there, and wait for some steps."""
        engine = {"engine": "ray", "engine.placement": "strict_spread", "engine.address": self._hosts.address}
        params = {"params.pause": "1", "params.go": str(self.go)}
        options = [word for key, value in (engine | params).items() for word in ("--set", f"{key}={value}")]
        self._process = self._train("--workers", "2", *options)
        self.await_steps(3)
        assert [len(one["members"]) for one in self.events("generation")] == [2]

    def events(self, kind: str) -> list[dict[str, Any]]:
        # The last line may be half written.
        whole = [file.read_text().rpartition("\n")[0] for file in self.folder.glob("runs/*/events.jsonl")]
        found = [json.loads(line) for text in whole for line in text.splitlines()]
        return [event for event in found if event["kind"] == kind]

    def await_count(self, kind: str, count: int) -> None:
        process = self._process
        assert process is not None

        def look() -> bool:
            assert process.poll() is None, process.communicate()[1]
            return len(self.events(kind)) >= count

        await_condition(f"{count} of {kind}", look, PATIENCE)

    def await_steps(self, more: int) -> None:
        """So many steps from now on."""
        self.await_count("step", len(self.events("step")) + more)

    def assert_same_in_the_end(self, digest: str) -> None:
        """The job ends with these bits; every step was told once, by one coordinator."""
        self.go.touch()
        assert self._process is not None
        assert self._result(self._process)["weights_digest"] == digest
        assert [event["step"] for event in self.events("step")] == list(range(1, STEPS + 1))
        names = [event["generation"] for event in self.events("generation")]
        assert len(set(names)) == len(names)
        (coordinators,) = self.folder.glob("runs/*/coordinators")
        assert {name.partition(".")[0] for name in names} == {one.name for one in coordinators.iterdir()} == {"1"}

    def _train(self, *options: str) -> "subprocess.Popen[str]":
        return self._hosts.popen(
            self._place,
            "quorate",
            *("train", str(self.folder / "job.yaml"), "--json", *options),
            env=self._hosts.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def _result(process: "subprocess.Popen[str]") -> dict[str, Any]:
        out, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        fields: dict[str, Any] = json.loads(out)
        return fields


@contextmanager
def job_on_hosts(folder: Path, count: int, launcher: int, **options: Any) -> Iterator[tuple[Job, RayHosts]]:
    hosts = RayHosts(folder, count, **options)
    try:
        yield Job(folder, hosts, launcher), hosts
    finally:
        hosts.close()


def test_a_host_that_is_cut_off_for_a_while_is_done_without_and_used_again(tmp_path: Path) -> None:
    with job_on_hosts(tmp_path, 2, launcher=0) as (job, hosts):
        hosts.start_head(cpus=2)
        hosts.start_node(1, cpus=2)
        digest = job.undisturbed()
        job.begin()
        hosts.cut(1)
        over = time.monotonic() + CUT
        job.await_count("lost", 1)
        job.await_steps(2)
        assert len(job.events("generation")[1]["members"]) == 1, "the one with the coordinator goes on"
        await_condition("the end of the cut", lambda: time.monotonic() > over, 2 * CUT)
        hosts.heal(1)
        job.await_count("generation", 3)
        assert len(job.events("generation")[2]["members"]) == 2, "the other is used again"
        job.assert_same_in_the_end(digest)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (apt-get install redis-server)")
def test_training_goes_on_while_the_head_is_dead_and_a_host_is_replaced_after_it_was_started_again(
    tmp_path: Path,
) -> None:
    with job_on_hosts(tmp_path, 4, launcher=1, with_redis=True) as (job, hosts):
        hosts.start_head(cpus=0)
        hosts.start_node(1, cpus=2)
        hosts.start_node(2, cpus=2)
        digest = job.undisturbed()
        job.begin()
        hosts.lose_power(0)
        job.await_steps(3)
        hosts.start_head(cpus=0)
        job.await_steps(2)
        assert job.events("lost") == [], "nobody who trains needs the head"
        hosts.lose_power(2)
        job.await_count("lost", 1)
        job.await_steps(2)
        hosts.start_node(3, cpus=2)
        job.await_count("generation", 3)
        assert [len(one["members"]) for one in job.events("generation")] == [2, 1, 2]
        job.assert_same_in_the_end(digest)
