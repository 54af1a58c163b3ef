"""Runs tracked by a real MLflow, on a server and in a file: one run for each, every step once, whatever happens."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import Workplace, await_condition
from schemas import validate
from services.mlflow_database import Database
from services.servers import MlflowServer
from services.tracked import TOLD, catch_up, train_tracked
from small_disk import small_disk

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

STEPS = list(range(1, 9))
SECRET = "correct-horse-battery"
TRACKED_PID = "quorate.api.tracker"


def steps_of(curve: list[tuple[int, float]]) -> list[int]:
    return [step for step, _ in curve]


def losses(place: Workplace) -> list[tuple[int, float]]:
    """As the newest run's file tells them, the first time."""
    told: dict[int, float] = {}
    for event in place.events():
        if event["kind"] == "step":
            told.setdefault(event["step"], event["loss"])
    return sorted(told.items())


def test_a_run_in_a_file_has_all_that_is_to_be_known_of_it(workplace: Workplace) -> None:
    rate = "learning_rate: float = 0.01\n"
    workplace.task.write_text(workplace.task.read_text().replace(rate, f"{rate}    password: str = ''\n"))
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "task.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=workplace.folder, check=True)
    with workplace.task.open("a") as task:
        task.write("# changed since\n")
    with_secret = {"learning_rate": 0.02, "password": SECRET}
    workplace.write_job(track={"mlflow": True, "wandb": "offline", "every": 3}, params=with_secret)
    train_tracked(workplace, "--workers", "2")
    database = Database(workplace.folder / "runs" / "mlflow.db")
    assert database.runs() == {"tiny-0001": "FINISHED"}
    curves = database.curves("tiny-0001")
    assert steps_of(curves["train/loss"]) == [3, 6, 8]
    assert curves["train/loss"] == [point for point in losses(workplace) if point[0] in (3, 6, 8)]
    assert {"train/learning_rate", "train/grad_norm", "train/throughput", "train/epoch"} <= set(curves)
    assert {"time/data", "time/compute", "time/exchange", "time/apply", "val/loss"} <= set(curves)
    assert steps_of(curves["val/loss"]) == [4, 8]
    parameters = database.pairs("params", "tiny-0001")
    assert (parameters["params.learning_rate"], parameters["lanes"], parameters["batch_size"]) == ("0.02", "4", "8")
    tags = database.pairs("tags", "tiny-0001")
    assert (tags["quorate.status"], tags["quorate.workers"], tags["quorate.strategy"]) == ("complete", "2", "ring")
    assert (len(tags["mlflow.source.git.commit"]), tags["quorate.git.dirty"]) == (40, "true")
    (artifacts,) = (workplace.folder / "runs" / "mlflow-artifacts").glob("*/artifacts")
    assert "+# changed since" in (artifacts / "git.diff").read_text()
    job = (workplace.last / "job.yaml").read_text()
    assert (artifacts / "job.yaml").read_text() == job.replace(SECRET, "***") != job
    assert (artifacts / "environment.json").is_file()
    assert (artifacts / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (artifacts / "curves" / "val-loss.png").is_file()
    assert {"tracker"} == {record["process"] for record in workplace.log_records("tracker")}
    assert list((workplace.folder / "runs" / "mlflow-artifacts").rglob("model.pt2")), "the model is logged"
    everything = (file for file in (workplace.folder / "runs").rglob("*") if file.is_file())
    files = [file for file in everything if workplace.last / "checkpoints" not in file.parents]
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == [workplace.last / "job.yaml"]


LOGS_FILES = """
from pathlib import Path

import mlflow


class Own(Tiny):
    def datasets(self):
        mlflow.log_text("made before the first step", "data.txt")
        return super().datasets()

    def metrics(self, model, batch):
        Path("table.csv").write_text("a,b")
        mlflow.log_artifact("table.csv")
        return super().metrics(model, batch)
"""


@pytest.mark.parametrize("at", ["file", "server"])
def test_what_the_task_itself_logs_lands_in_the_run_of_the_job_also_after_a_resume(
    workplace: Workplace, own_mlflow_server: MlflowServer, at: str
) -> None:
    where: bool | str = True
    folder, database = workplace.folder / "runs" / "mlflow-artifacts", workplace.folder / "runs" / "mlflow.db"
    if at == "server":
        own_mlflow_server.start()
        where, folder = own_mlflow_server.uri, own_mlflow_server.folder / "artifacts"
        database = own_mlflow_server.folder / "server.db"
    with workplace.task.open("a") as task:
        task.write(LOGS_FILES)
    workplace.write_job(task="task.py:Own", steps=4, track={"mlflow": where})
    train_tracked(workplace, "--workers", "2")
    assert Database(database).runs() == {"tiny-0001": "FINISHED"}
    for name in ("data.txt", "table.csv"):
        assert len(list(folder.rglob(name))) == 1
        for file in folder.rglob(name):
            file.unlink()
    resumed = workplace.run("resume", "last", "--steps", "8")
    assert resumed.code == 0, resumed.stderr
    catch_up(workplace)
    assert Database(database).runs() == {"tiny-0001": "FINISHED"}
    for name in ("data.txt", "table.csv"):
        assert len(list(folder.rglob(name))) == 1


def test_under_five_faults_and_a_resume_the_curve_is_the_undisturbed_one(workplace: Workplace) -> None:
    workplace.write_job(steps=30, checkpoint={"every": 4}, track={"mlflow": True, "tensorboard": True})
    faults = [
        "kill worker 1 at step 5",
        "kill coordinator at step 9",
        "kill launcher at step 14",
        "term worker 0 at step 18",
        "kill worker 1 at step 24",
    ]
    flags = [word for fault in faults for word in ("--fault", fault)]
    done = workplace.run("chaos", "job.yaml", "--set", "workers=2", "--json", *flags)
    document = done.document
    assert document["same"], done.stderr
    catch_up(workplace)
    database = Database(workplace.folder / "runs" / "mlflow.db")
    assert database.runs() == {"tiny-0001": "FINISHED", "tiny-0002": "FINISHED"}
    undisturbed_curves, disturbed = database.curves("tiny-0001"), database.curves("tiny-0002")
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "val/loss"):
        assert disturbed[name] == undisturbed_curves[name], name
    # A machine is looked at by the clock, not by steps.
    for name, curve in ((name, curve) for name, curve in disturbed.items() if not name.startswith("system/")):
        assert len(steps_of(curve)) == len(set(steps_of(curve))), f"a step of {name} is there twice"
        assert name.startswith("val/") or steps_of(curve) == list(range(1, 31)), name
    assert points_of_tensorboard(workplace.last) == points_of_tensorboard(workplace.runs()[0])


def test_a_server_that_dies_and_comes_back_has_everything(
    workplace: Workplace, own_mlflow_server: MlflowServer
) -> None:
    server = own_mlflow_server
    workplace.write_job(steps=100)
    undisturbed = workplace.train("--json").document["weights_digest"]
    server.start()
    database = Database(server.folder / "server.db")
    workplace.write_job(steps=100, track={"mlflow": server.uri})
    job = workplace.start("train", "job.yaml", "--workers", "2", "--json", SLOW="0.3")
    await_condition("the first steps", lambda: database.curves("tiny-0002"))
    server.kill()
    killed_at = max(event["step"] for event in workplace.events() if event["kind"] == "step")
    job.await_event("step", at_least=killed_at + 5)
    server.start()
    workplace.go()
    done = job.done()
    assert (done.code, done.document["weights_digest"]) == (0, undisturbed), done.stderr
    catch_up(workplace)
    assert database.runs() == {"tiny-0002": "FINISHED"}
    assert database.curves("tiny-0002")["train/loss"] == losses(workplace)
    assert len(losses(workplace)) == 100
    assert list(server.folder.glob("artifacts/**/loss.png"))


def test_a_server_that_was_never_there_is_caught_up_with_later(
    workplace: Workplace, own_mlflow_server: MlflowServer, undisturbed: str
) -> None:
    server = own_mlflow_server
    workplace.write_job(track={"mlflow": server.uri})
    done = workplace.train("--workers", "2", "--json")
    assert (done.code, done.document["weights_digest"]) == (0, undisturbed), done.stderr
    assert f"MLflow at {server.uri} does not have all of the run" in done.stderr
    assert done.stderr.rstrip().endswith(f"{TOLD} tiny-0001")
    again = workplace.run("track", "last", "--json")
    assert again.code == 1
    validate("track", again.document)
    assert again.document["trackers"][0]["missing"]
    assert "Traceback" not in again.stderr
    server.start()
    done = workplace.run("track", "last", "--json")
    assert done.code == 0, done.stderr
    validate("track", done.document)
    (tracker,) = done.document["trackers"]
    assert (tracker["last_step"], tracker["missing"]) == (8, None)
    database = Database(server.folder / "server.db")
    assert database.curves("tiny-0001")["train/loss"] == losses(workplace)
    assert database.runs() == {"tiny-0001": "FINISHED"}
    done = workplace.run("track", "last")
    assert "nothing was missing" in done.stdout
    server.kill()
    done = workplace.run("track", "last")
    assert (done.code, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "nothing is sure after step 8 (" in done.stdout


def test_a_full_disk_below_the_database_is_told_once_and_caught_up_with(
    workplace: Workplace, tmp_path: Path, undisturbed: str
) -> None:
    with small_disk(tmp_path.parent / f"{tmp_path.name}-disk", "64k") as disk:
        file = disk / "mlflow.db"
        workplace.write_job(track={"mlflow": f"sqlite:///{file}"})
        done = workplace.train("--workers", "2", "--json")
        assert (done.code, done.document["weights_digest"]) == (0, undisturbed), done.stderr
        assert done.stderr.count("does not have all of the run") == 1
        subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
        done = workplace.run("track", "last")
        assert done.code == 0, done.stdout + done.stderr
        assert Database(file).curves("tiny-0001")["train/loss"] == losses(workplace)


def test_a_tracker_that_is_killed_is_missed_by_nobody_and_told_of(workplace: Workplace, undisturbed: str) -> None:
    workplace.write_job(track={"mlflow": True, "tensorboard": True, "wandb": "offline"})
    job = workplace.start("train", "job.yaml", "--workers", "2", "--json", HOLD="9")
    database = Database(workplace.folder / "runs" / "mlflow.db")
    await_condition("the first steps", lambda: database.curves("tiny-0001"))
    for pid in workplace.pids(TRACKED_PID):
        os.kill(pid, signal.SIGKILL)
    workplace.go()
    done = job.done()
    assert (done.code, done.document["weights_digest"]) == (0, undisturbed), done.stderr
    assert f"{TOLD} tiny-0001" in done.stderr
    done = workplace.run("track", "last")
    assert done.code == 0, done.stdout + done.stderr
    assert database.curves("tiny-0001")["train/loss"] == losses(workplace)
    assert [step for step, _ in points_of_tensorboard(workplace.last)["train/loss"]] == STEPS
    assert points_of_wandb(workplace.last)["train/loss"] == dict(losses(workplace))


def test_a_killed_launcher_leaves_no_tracker_and_its_run_goes_on(workplace: Workplace, undisturbed: str) -> None:
    workplace.write_job(track={"mlflow": True, "tensorboard": True, "wandb": "offline"})
    job = workplace.start("train", "job.yaml", "--workers", "2", HOLD="11")
    database = Database(workplace.folder / "runs" / "mlflow.db")
    job.await_event("checkpoint", at_least=4)
    await_condition("the first steps", lambda: database.curves("tiny-0001"))
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.communicate()
    workplace.assert_nobody_left(within=90)
    assert database.runs() == {"tiny-0001": "KILLED"}
    workplace.go()
    done = workplace.run("resume", "last", "--json")
    assert (done.code, done.document["weights_digest"]) == (0, undisturbed), done.stderr
    if TOLD in done.stderr:
        catch_up(workplace)
    assert database.runs() == {"tiny-0001": "FINISHED"}
    assert database.curves("tiny-0001")["train/loss"] == losses(workplace)
    tensorboard = points_of_tensorboard(workplace.last)
    assert [step for step, _ in tensorboard["train/loss"]] == STEPS
    assert points_of_wandb(workplace.last)["train/loss"] == dict(losses(workplace))
    assert len({file.name for file in workplace.last.glob("wandb/offline-run-*/run-*.wandb")}) == 1, "one W&B run"


def points_of_tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    from quorate.tracking.tensorboard_tracker import read_back

    curves: dict[str, list[tuple[int, float]]] = {}
    for point in read_back(run / "tensorboard"):
        if not point.name.startswith(("time/", "train/throughput", "system/")):
            curves.setdefault(point.name, []).append((point.step, point.value))
    return curves


def points_of_wandb(run: Path) -> dict[str, dict[int, Any]]:
    from quorate.tracking.wandb_tracker import read_values

    curves: dict[str, dict[int, Any]] = {}
    for name, step, value in read_values(run / "wandb"):
        assert step not in curves.setdefault(name, {}), f"step {step} of {name} is there twice"
        curves[name][step] = value
    return curves


def test_the_experiment_the_name_and_tags_are_the_jobs_own(workplace: Workplace) -> None:
    own = {"experiment": "sweeps", "run_name": "wider", "tags": {"team": "vision", "ticket": 17}}
    workplace.write_job(track={"mlflow": True, **own}, steps=2)
    train_tracked(workplace, MLFLOW_EXPERIMENT_NAME="not this one")
    database = Database(workplace.folder / "runs" / "mlflow.db")
    assert database.runs() == {"wider": "FINISHED"}
    assert database.pairs("tags", "wider").items() >= {("team", "vision"), ("ticket", "17")}
    assert {("sweeps",)} == set(database.ask("SELECT e.name FROM runs JOIN experiments e USING (experiment_id)"))
