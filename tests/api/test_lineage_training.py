"""A job with a lineage trains what it was before, and ends with the bits of the branches that it tells of."""

import json
from pathlib import Path
from typing import Any

import pytest

from api.test_training_from_python import run_python
from command import Workplace, await_condition

BRANCHES = """
import json
from pathlib import Path
from quorate.api import session
from quorate.api.prints import NoDisplay
from quorate.spec.load import load_job
from quorate.spec.override import Override

hide = lambda _: NoDisplay()

def branch(rate, until):
    over = [Override("params.learning_rate", rate, "a branch")]
    return session.resume(Path("runs"), "last", {}, over, watch=hide, branch=True, until=until)

if __name__ == "__main__":
    first = session.start(load_job(Path("job.yaml"), {}, []), hide, until=3)
    second = branch(0.05, 6)
    print(json.dumps(branch(0.002, None).fields))
"""
LINEAGE = [{"until": 3, "params": {"learning_rate": 0.01}}, {"until": 6, "params": {"learning_rate": 0.05}}]
KEYS: dict[str, Any] = {"evaluate": {"every": 3}, "schedule": {"kind": "cosine", "warmup": 1}}


@pytest.fixture
def branched(workplace: Workplace) -> tuple[Workplace, str]:
    """A workplace with three runs, each a branch of the one before, and the digest that they came to."""
    workplace.write_job(workers=2, params={"learning_rate": 0.01}, **KEYS)
    (workplace.folder / "branches.py").write_text(BRANCHES)
    done = run_python(workplace, "branches.py")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert (fields["status"], fields["from_step"], fields["steps"]) == ("complete", 6, 8)
    return workplace, fields["weights_digest"]


@pytest.mark.long
def test_the_job_of_a_branch_is_trained_to_its_digest(branched: tuple[Workplace, str]) -> None:
    workplace, digest = branched
    job = (workplace.last / "job.yaml").read_text()
    (workplace.folder / "best-job.yaml").write_text(job)
    done = workplace.run("train", "best-job.yaml", "--workers", "1", "--json")
    assert done.code == 0, done.stderr
    assert (done.document["run"], done.document["weights_digest"]) == ("tiny-0004", digest)
    # The parts stay, and are runs of their own.
    parts = sorted(workplace.last.glob("lineage/*"))
    assert [part.name for part in parts] == ["part-0001", "part-0002"]
    told = [json.loads((part / "result.json").read_text()) for part in parts]
    assert [(part["ending"], part["from_step"], part["steps"]) for part in told] == [("paused", 0, 3), ("paused", 3, 6)]
    # Without its lineage it is another job.
    plain = workplace.run("train", "best-job.yaml", "--set", "lineage=[]", "--json").document
    assert plain["weights_digest"] != digest


@pytest.mark.long
def test_a_job_that_is_stopped_in_its_lineage_is_resumed_there(branched: tuple[Workplace, str]) -> None:
    workplace, digest = branched
    workplace.write_job(workers=1, params={"learning_rate": 0.002}, lineage=LINEAGE, **KEYS)
    running = workplace.start("train", "job.yaml", "--json", HOLD="5")
    part = workplace.folder / "runs" / "tiny-0004" / "lineage" / "part-0001"
    await_condition("a step", lambda: _steps(part / "events.jsonl"))
    running.interrupt()
    workplace.go()
    done = running.done()
    assert (done.code, done.document["run"], done.document["status"]) == (130, "tiny-0004", "interrupted"), done.stderr
    assert not workplace.checkpoints()
    assert workplace.result()["status"] == "interrupted"
    again = workplace.run("resume", "last", "--json")
    assert again.code == 0, again.stderr
    assert (again.document["run"], again.document["weights_digest"]) == ("tiny-0004", digest)
    assert again.document["from_step"] == 6
    assert len(workplace.runs()) == 4


def _steps(events: Path) -> bool:
    return events.exists() and '"kind":"step"' in events.read_text()


@pytest.mark.long
def test_a_mistake_in_a_part_leaves_no_run(workplace: Workplace) -> None:
    workplace.write_job(workers=1, lineage=[{"until": 3, "params": {"learning_rat": 0.01}}])
    done = workplace.train()
    assert done.code == 2
    assert "learning_rat: there is no such key" in done.error
    assert workplace.runs() == []


@pytest.mark.long
def test_a_job_that_fails_in_its_lineage_says_how_to_go_on(workplace: Workplace) -> None:
    workplace.write_job(workers=1, params={"learning_rate": 0.002}, lineage=LINEAGE, **KEYS)
    failed = workplace.train(TROUBLE="loss")
    assert (failed.code, workplace.result()["status"]) == (1, "failed")
    assert "trouble in loss" in failed.error
    assert failed.advice == "quorate resume tiny-0001  (continues its lineage)"
    resumed = workplace.run("resume", "last", "--workers", "2", "--json")
    assert resumed.code == 0, resumed.stderr
    assert "workers: 2" in (workplace.last / "job.yaml").read_text()
    undisturbed = workplace.train("--json")
    assert undisturbed.document["run"] == "tiny-0002"
    assert resumed.document["weights_digest"] == undisturbed.document["weights_digest"]
