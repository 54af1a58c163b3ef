"""Mistakes with runs, checkpoints, files and ports."""

import json
import shutil
from dataclasses import replace

from catalogue.case import Case
from command import Workplace
from quorate.checkpoint.manifest import Manifest


def damage_checkpoints(workplace: Workplace) -> None:
    for state in workplace.last.glob("checkpoints/*/*.safetensors"):
        state.write_bytes(state.read_bytes()[:-1])


def lose_checkpoints(workplace: Workplace) -> None:
    shutil.rmtree(workplace.last / "checkpoints")


def forget_checkpoints(workplace: Workplace) -> None:
    lose_checkpoints(workplace)
    events = workplace.last / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["kind"] != "checkpoint"))


def copy_elsewhere(workplace: Workplace) -> None:
    lose_checkpoints(workplace)
    job = workplace.last / "job.yaml"
    job.write_text(job.read_text().replace("to: [checkpoints]", "to: [checkpoints, s3://bucket/prefix]"))


def save_by_a_newer_version(workplace: Workplace) -> None:
    manifest = sorted(workplace.last.glob("checkpoints/*/manifest.json"))[-1]
    manifest.write_text(replace(Manifest.from_json(manifest.read_text()), format=99).to_json())


def lose_job_and_checkpoints(workplace: Workplace) -> None:
    lose_checkpoints(workplace)
    (workplace.last / "job.yaml").unlink()


def count_in_epochs(workplace: Workplace) -> None:
    job = workplace.last / "job.yaml"
    job.write_text(job.read_text().replace("epochs: null", "epochs: 2").replace("steps: 8", "steps: null"))


def put_a_file_in_the_way(workplace: Workplace) -> None:
    (workplace.folder / "runs").write_text("in the way")


def change_source(workplace: Workplace) -> None:
    workplace.task.write_text(workplace.task.read_text() + "\nCHANGED = True\n")


CASES = (
    Case("No runs yet", command="quorate resume last"),
    Case("A misspelt run", command="quorate resume tinny", finished=True),
    Case("A run that is complete", command="quorate resume last", finished=True),
    Case("Another seed", command="quorate resume last --seed 3", finished=True),
    Case("Another parameter", command="quorate resume last --set params.learning_rate=0.5", finished=True),
    Case("Fewer steps", command="quorate resume last --steps 4", finished=True),
    Case(
        "Steps of a run that counts in epochs",
        command="quorate resume last --steps 16",
        story="The job of the run has `epochs: 2`.",
        prepare=count_in_epochs,
        finished=True,
    ),
    Case("Too many workers", command="quorate resume last --steps 16 --workers 99", finished=True),
    Case(
        "A run without a checkpoint",
        command="quorate resume last --steps 16",
        story="Nothing was saved before the run ended.",
        prepare=forget_checkpoints,
        finished=True,
    ),
    Case(
        "Checkpoints that were removed",
        command="quorate resume last --steps 16",
        story="The folder of checkpoints was removed.",
        prepare=lose_checkpoints,
        finished=True,
    ),
    Case(
        "Checkpoints that were removed, with copies elsewhere",
        command="quorate resume last --steps 16",
        story="The folder of checkpoints was removed; `checkpoint.to` is `[checkpoints, s3://bucket/prefix]`.",
        prepare=copy_elsewhere,
        finished=True,
    ),
    Case(
        "A checkpoint of a newer version of Quorate",
        command="quorate resume last --steps 16",
        story="The newest checkpoint has format 99.",
        prepare=save_by_a_newer_version,
        finished=True,
    ),
    Case(
        "A run without a job and without checkpoints",
        command="quorate resume last --steps 16",
        story="job.yaml and the folder of checkpoints were removed.",
        prepare=lose_job_and_checkpoints,
        finished=True,
    ),
    Case(
        "Checkpoints that are all damaged",
        command="quorate resume last --steps 16",
        story="The last byte of every checkpoint is lost.",
        prepare=damage_checkpoints,
        finished=True,
    ),
    Case(
        "A task that has changed since",
        command="quorate resume last --steps 16",
        story="task.py has another line now.",
        prepare=change_source,
        finished=True,
        starts=True,
    ),
    Case("A file in the place of the folder of runs", story="`runs` is a file.", prepare=put_a_file_in_the_way),
)
