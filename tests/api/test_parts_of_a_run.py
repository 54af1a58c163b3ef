"""A run whose parts end after a given step."""

import json
import os
from pathlib import Path

import pytest

from api.test_training_from_python import run_python
from command import Workplace
from quorate.api import session
from quorate.api.prints import NoDisplay
from quorate.core.errors import RequestError
from quorate.spec.load import load_job
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder

PARTS = """
import json
from pathlib import Path
from quorate.api import session
from quorate.api.prints import NoDisplay
from quorate.spec.load import load_job

if __name__ == "__main__":
    hide = lambda _: NoDisplay()
    first = session.start(load_job(Path("job.yaml"), {}, []), hide, until=3)
    second = session.resume(Path("runs"), "last", {}, [], watch=hide, until=9)
    print(json.dumps([first.fields, second.fields]))
"""


def test_a_part_ends_after_the_step_that_is_given_and_can_be_resumed(workplace: Workplace, undisturbed: str) -> None:
    workplace.write_job(workers=2, checkpoint={"keep": 9})
    (workplace.folder / "parts.py").write_text(PARTS)
    done = run_python(workplace, "parts.py")
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    told = [(part["status"], part["ending"], part["from_step"], part["steps"]) for part in parts]
    assert told == [("interrupted", "paused", 0, 3), ("complete", "complete", 3, 8)]
    assert parts[-1]["weights_digest"] == undisturbed
    ends = [event["result"]["ending"] for event in workplace.events() if event["kind"] == "finished"]
    assert ends == ["paused", "complete"]
    assert workplace.checkpoints()[0].startswith("step-00000003")
    # The job itself is as it was.
    assert "until" not in (workplace.last / "job.yaml").read_text()


def test_a_part_cannot_end_before_it_begins(used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(used_workplace.folder)
    with pytest.raises(RequestError, match=r"^until 0: there is no such step ahead of step 0"):
        session.start(load_job(used_workplace.job, {}, []), lambda _: NoDisplay(), until=0)
    run = RunFolder(used_workplace.last)
    layer = [Override("steps", 20, "--steps")]
    with pytest.raises(RequestError, match=r"^until 7: there is no such step ahead of step 8"):
        session.resume(run.path.parent, run.name, os.environ, layer, watch=lambda _: NoDisplay(), until=7)
    assert used_workplace.result()["status"] == "complete"
    assert [path.name for path in Path("runs").iterdir() if path.is_dir()] == ["tiny-0001"]
