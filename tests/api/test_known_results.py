"""A job whose identity is known is answered with the run that has it; a longer one continues that run."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Done, Workplace
from quorate.api.known_results import Known, best_known, known_run, likely_runs
from quorate.api.run_part import run_locally
from quorate.history.identity import Identity
from quorate.spec.job import JobSpec
from quorate.spec.load import load_job
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.storage.identity_file import read_identity, write_identity
from quorate.storage.run_folder import RunFolder, write_creation
from schemas import validate


def train(place: Workplace, *words: str, code: int = 0, **keys: Any) -> Done:
    place.write_job(**{"reuse": True, **keys})
    done = place.train("--workers", "1", "--json", *words)
    assert done.code == code, done.stderr
    validate("train", done.document)
    return done


def identity_of(place: Workplace, run: str) -> Identity | None:
    return Identity.of_run(RunFolder(place.folder / "runs" / run))


def runs(place: Workplace) -> list[str]:
    return sorted(entry.name for entry in (place.folder / "runs").iterdir() if entry.is_dir())


def test_what_is_known_is_not_trained_again(workplace: Workplace) -> None:
    first = train(workplace).document
    assert "reused_from" not in first
    before = sorted(workplace.folder.joinpath("runs", "tiny-0001").rglob("*"))
    # Another name, another number of workers, and a comment: the same results.
    workplace.task.write_text(f"{workplace.task.read_text()}\n# a word\n")
    known = train(workplace, name="other", checkpoint={"every": 3})
    assert known.document == {**first, "reused_from": "tiny-0001"}
    told = workplace.train("--workers", "1", "--quiet")
    assert "known       all, by run tiny-0001 of the same code, versions, machine and data" in told.stdout + told.stderr
    assert runs(workplace) == ["tiny-0001"]
    assert before == sorted(workplace.folder.joinpath("runs", "tiny-0001").rglob("*"))

    fresh = train(workplace, "--fresh").document
    assert fresh["run"] == "tiny-0002" and "reused_from" not in fresh
    assert fresh["weights_digest"] == first["weights_digest"]
    assert identity_of(workplace, "tiny-0001") == identity_of(workplace, "tiny-0002")

    shown = workplace.run("show", "tiny-0001", "--json").document
    validate("show", shown)
    assert "data proven: sha-256 of all" in workplace.run("show", "tiny-0001").stdout


def test_a_longer_job_continues_what_is_known_to_the_same_bits(workplace: Workplace) -> None:
    short = train(workplace, steps=6).document
    longer = train(workplace, steps=10)
    assert (longer.document["run"], longer.document["from_step"]) == ("tiny-0002", 6)
    assert longer.document["reused_from"] == short["run"]
    fresh = train(workplace, "--fresh", steps=10).document
    assert fresh["from_step"] == 0
    for field in ("weights_digest", "final_metrics", "best", "ledger", "steps"):
        assert fresh[field] == longer.document[field], field
    # It is as if it had been trained at once: it has the same identity, and is known by it.
    assert identity_of(workplace, "tiny-0002") == identity_of(workplace, "tiny-0003")
    events = workplace.events(workplace.folder / "runs" / "tiny-0002")
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, 11))
    # One that is shorter than what is known is trained.
    assert train(workplace, steps=4).document["run"] == "tiny-0004"


def test_another_identity_is_trained(workplace: Workplace) -> None:
    train(workplace)
    assert train(workplace, seed=1).document["run"] == "tiny-0002"
    workplace.task.write_text(workplace.task.read_text().replace("manual_seed(1)", "manual_seed(2)"))
    assert train(workplace).document["run"] == "tiny-0003"
    # With the same code and other data alone.
    drawn, loaded = "torch.randn(samples, 3, generator=generator)", "torch.load('points.pt')[:samples]"
    workplace.task.write_text(workplace.task.read_text().replace(drawn, loaded))
    points = torch.randn(32, 3)
    torch.save(points, workplace.folder / "points.pt")
    assert train(workplace).document["run"] == "tiny-0004"
    points[17] += 1
    torch.save(points, workplace.folder / "points.pt")
    assert train(workplace).document["run"] == "tiny-0005"


def test_data_that_are_not_proven_are_never_reused(workplace: Workplace) -> None:
    workplace.task.write_text(workplace.task.read_text().replace("Points(32)", "Points(2_000)"))
    train(workplace)
    assert train(workplace).document["run"] == "tiny-0002"
    found = identity_of(workplace, "tiny-0001")
    assert found is not None and found.data.startswith("unproven: the training set has more than 1,024 samples")


def test_a_run_that_was_resumed_with_other_versions_has_no_identity(workplace: Workplace) -> None:
    train(workplace, steps=4)
    run = RunFolder(workplace.folder / "runs" / "tiny-0001")
    found = read_identity(run)
    assert found is not None
    found["facts"]["versions"]["torch"] = "0.1"
    write_identity(run, found)
    done = workplace.run("resume", "last", "--steps", "6", "--workers", "1", "--quiet")
    assert done.code == 0, done.stderr
    assert Identity.of_run(run) is None
    unknown = read_identity(run)
    assert unknown is not None
    assert unknown["unknown"] == "it goes on from tiny-0001, of which these were others: versions"


# --- asked of many runs


@pytest.fixture
def thousand(tmp_path: Path, finished: Path) -> tuple[JobSpec, Path]:
    """A thousand runs that differ in a parameter, and the job of one of them."""
    spec = load_job(finished / "job.yaml", {}, []).spec
    found = read_identity(RunFolder(finished / "runs" / "tiny-0001"))
    assert found is not None
    for number in range(1, 1_001):
        run = RunFolder(tmp_path / f"tiny-{number:04}")
        run.make()
        write_creation(run.path)
        task = {**found["facts"]["task"], "params": {"learning_rate": number / 1_000}}
        write_identity(run, {**found, "facts": {**found["facts"], "task": task}})
    shutil.copytree(finished / "runs" / "tiny-0001" / "checkpoints", run.path / "checkpoints", dirs_exist_ok=True)
    run.write_job(dump_job(ResolvedJob(spec, {}, "job")))
    run.write_result(json.loads((finished / "runs" / "tiny-0001" / "result.json").read_text()))
    return spec.model_copy(update={"params": {"learning_rate": 1.0}, "reuse": True}), tmp_path


def asked(spec: JobSpec, folder: Path) -> Known | None:
    """What is known of the job, if it is as the last run says."""
    now = Identity.of_run(RunFolder(folder / "tiny-1000"))
    assert now is not None
    return best_known(spec, likely_runs(spec, folder), now)


def test_a_thousand_runs_are_asked_in_half_a_second(thousand: tuple[JobSpec, Path]) -> None:
    spec, folder = thousand
    for params in ({"learning_rate": 1.0}, {}):  # the second says nothing that would tell them apart
        began = time.process_time()
        found = asked(spec.model_copy(update={"params": params}), folder)
        seconds = time.process_time() - began
        assert found is not None and found.is_complete and found.run.name == "tiny-1000"
        assert seconds <= 0.5


@pytest.mark.parametrize("change", [{"reuse": None}, {"reuse": False}, {"deterministic": False}, {"seed": 9}])
def test_who_need_not_be_asked_is_not(thousand: tuple[JobSpec, Path], change: dict[str, Any]) -> None:
    """Nothing is imported or read, that is: there is no task."""
    spec, folder = thousand
    changed = spec.model_copy(update=change)
    assert known_run(ResolvedJob(changed, {}, "job"), folder, run_locally) is None


@pytest.mark.parametrize("missing", ["checkpoints", "result.json", "job.yaml"])
def test_a_run_that_has_lost_what_it_came_to_is_no_answer(thousand: tuple[JobSpec, Path], missing: str) -> None:
    spec, folder = thousand
    lost = folder / "tiny-1000" / missing
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    found = asked(spec, folder)
    assert found is None or not found.is_complete


def test_a_result_whose_checkpoint_is_damaged_is_no_answer(thousand: tuple[JobSpec, Path]) -> None:
    spec, folder = thousand
    saved = max(entry for entry in (folder / "tiny-1000" / "checkpoints").iterdir() if entry.is_dir())
    part = max(saved.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    found = asked(spec, folder)
    assert found is None or not found.is_complete


def test_what_is_gone_meanwhile_leaves_no_half_a_run(thousand: tuple[JobSpec, Path], tmp_path: Path) -> None:
    spec, folder = thousand
    found = asked(spec, folder)
    assert found is not None and not (found.run.events_file).exists()
    run = RunFolder.create(tmp_path / "others", "tiny")
    assert not found.take_over(run, ResolvedJob(spec, {}, "job"))
    assert not run.path.exists()


def test_a_run_under_way_is_no_answer(thousand: tuple[JobSpec, Path]) -> None:
    spec, folder = thousand
    with RunFolder(folder / "tiny-1000").lock():
        assert asked(spec, folder) is None


def test_a_resume_to_more_steps_that_was_refused_makes_no_answer_of_the_shorter_run(
    thousand: tuple[JobSpec, Path],
) -> None:
    spec, folder = thousand
    run = RunFolder(folder / "tiny-1000")
    found = read_identity(run)
    assert found is not None
    found["facts"]["job"]["steps"] = 100
    write_identity(run, found)
    known = asked(spec.model_copy(update={"steps": 100}), folder)
    assert known is not None and not known.is_complete


def test_a_library_that_is_imported_with_the_first_sample_is_no_other_identity(workplace: Workplace) -> None:
    pytest.importorskip("PIL")
    text = workplace.task.read_text()
    header = next(line for line in text.splitlines() if "def __getitem__" in line)
    workplace.task.write_text(text.replace(header, f"{header}\n        import PIL.Image"))
    first = train(workplace).document
    assert train(workplace).document["reused_from"] == first["run"]


def test_attributes_and_settings_from_the_environment_are_no_known_result(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = workplace.task.read_text()
    workplace.task.write_text(text.replace("lr=self.learning_rate", "lr=float(__import__('os').environ['RATE'])"))
    assert "RATE" in workplace.task.read_text()
    for rate, known in (("0.1", False), ("0.1", True), ("0.2", False)):
        monkeypatch.setenv("RATE", rate)
        assert ("reused_from" in train(workplace).document) is known
