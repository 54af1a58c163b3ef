"""A resume that was submitted to a cluster, as its launcher carries it out; here on this machine."""

from pathlib import Path
from typing import Any

import pytest

from command import Workplace, workplace  # noqa: F401 (a fixture)
from quorate.api.prints import NoDisplay
from quorate.api.run_part import Setup, run_locally
from quorate.api.session import resume_in
from quorate.api.tasks import TaskLocation
from quorate.core.errors import RunError
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import Submission, asked_of, submission_of, waits_to_begin


def submitted(place: Workplace, **asked: Any) -> RunFolder:
    """A run that has ended, and was submitted to go on."""
    assert place.run("train", "job.yaml", "--workers", "1", "--steps", "4").code == 0
    run = RunFolder(place.last.absolute())
    text = run.job_file.read_text()
    for key, (before, after) in asked.items():
        assert f"{key}: {before}" in text
        text = text.replace(f"{key}: {before}", f"{key}: {after}")
    asked_of(run).write_text(text)
    Submission("job", "auto", "task.py").write(run)
    assert waits_to_begin(run)
    return run


def carried_out(run: RunFolder, task: Path) -> Any:
    asked = load_recorded(asked_of(run), {}, [])
    place = TaskLocation(f"{task}:Tiny")
    return resume_in(run, asked, asked, Setup(place, lambda _: NoDisplay(), run_locally))


@pytest.mark.long  # it trains three times
def test_what_was_asked_for_is_trained_and_the_run_knows_its_launcher(workplace: Workplace) -> None:  # noqa: F811
    run = submitted(workplace, steps=(4, 8))
    assert workplace.run("show", "last", "--json").document["status"] == "submitted"
    assert carried_out(run, workplace.task).steps == 8
    assert not waits_to_begin(run)
    assert submission_of(run) is not None, "by which it is stopped"
    undisturbed = workplace.run("train", "job.yaml", "--workers", "1", "--steps", "8", "--json").document
    assert (run.read_result() or {})["weights_digest"] == undisturbed["weights_digest"]


def test_a_refusal_leaves_the_run_and_what_was_asked_for(workplace: Workplace) -> None:  # noqa: F811
    run = submitted(workplace, steps=(4, 8))
    before = run.read_result(), run.job_file.read_text()
    workplace.task.write_text(workplace.task.read_text() + "\nOTHER = 1\n")
    with pytest.raises(RunError, match="code has changed"):
        carried_out(run, workplace.task)
    assert (run.read_result(), run.job_file.read_text()) == before
    assert waits_to_begin(run), "whoever waits for it asks Ray what became of its launcher"
