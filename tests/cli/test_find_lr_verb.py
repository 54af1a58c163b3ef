"""`quorate find-lr`, with real trainings."""

import pytest

from command import Workplace
from schemas import validate


@pytest.mark.long
def test_it_is_the_same_on_any_number_of_workers_and_leaves_nothing(workplace: Workplace) -> None:
    before = (workplace.folder / "job.yaml").read_text()
    curve = workplace.folder / "curve.svg"
    flags = ("--steps", "40", "--from", "1e-4", "--to", "1e4", "--set", "schedule={kind: cosine}")
    documents = []
    for workers in ("1", "3"):
        done = workplace.run("find-lr", "job.yaml", "--json", "--workers", workers, "-o", str(curve), *flags)
        assert done.code == 0, done.stderr
        validate("find-lr", done.document)
        documents.append(done.document)
    assert documents[0] == documents[1]
    found = documents[0]
    assert found["diverged"] and len(found["rates"]) == len(found["losses"]) < 40
    assert 1e-4 < found["steepest"] < found["rates"][-1]
    assert found["setting"] == f"--set params.learning_rate={found['steepest']:.2g}"
    assert found["left_out"] == "cosine"
    assert "<svg" in curve.read_text()
    assert not (workplace.folder / "runs").exists()
    assert (workplace.folder / "job.yaml").read_text() == before


def test_people_see_a_curve_and_the_command_to_type(workplace: Workplace) -> None:
    done = workplace.run("find-lr", "job.yaml", "--steps", "20", "--from", "1e-3", "--to", "0.5")
    assert done.code == 0, done.stderr
    assert "quorate train job.yaml --set params.learning_rate=" in done.stdout
    assert "█" in done.stdout and "steepest" in done.stdout


@pytest.mark.long
def test_a_rate_that_does_not_reach_the_optimizer_is_refused(workplace: Workplace) -> None:
    source = workplace.task.read_text()
    workplace.task.write_text(source.replace("lr=self.learning_rate", "lr=0.01"))
    done = workplace.run("find-lr", "job.yaml")
    assert done.code == 2
    assert "does not reach the optimizer: given 1e-07 for the first step, its rates are" in done.error
    workplace.task.write_text(source.replace("learning_rate", "speed"))
    done = workplace.run("find-lr", "job.yaml")
    assert done.code == 2 and "Tiny has no param that is a learning rate" in done.error


def test_what_cannot_be_tested_is_refused_before_anything_runs(workplace: Workplace) -> None:
    for flags, told in (
        (("--from", "1", "--to", "0.1"), "the rates must rise"),
        (("--steps", "3"), "needs 10 steps at least"),
        (("-o", "curve.pdf"), "ends in .svg or .png"),
        (("--param", "speed"), "no such number among its params; its numbers are learning_rate"),
        (("--set", "batch_size=auto"), "needs a number for batch_size"),
    ):
        done = workplace.run("find-lr", "job.yaml", *flags)
        assert (done.code, told in done.error) == (2, True), done.stderr
