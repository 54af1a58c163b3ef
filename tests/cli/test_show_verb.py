import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from history.run_builder import COMPLETE, CREATED, Story, add_checkpoint, build_run, complete_run, whole_story
from quorate.cli import output
from quorate.cli.app import app
from quorate.cli.layout import Page
from quorate.cli.run_view import encryption_in_words, print_run
from quorate.coordinator.autopsy import autopsy_of_launcher
from quorate.core.errors import RunError
from quorate.core.failure import Failure
from quorate.core.runs_folder import as_typed
from quorate.core.task_source import TaskSource
from quorate.history.run_detail import Advice, RunDetail, advise
from quorate.observe.seldom_events import GradientsCompressed
from quorate.spec.load import resolve_mapping
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder
from quorate.storage.task_files import keep_source
from schemas import validate

NOW = CREATED + timedelta(minutes=3)
SECRET = "a-token-that-nobody-may-see"
NO_TORCH = """
import sys
sys.argv = ["quorate", *{arguments!r}]
from quorate.cli.main import run
try:
    run()
finally:
    assert not {{"torch", "grpc"}} & set(sys.modules), "it would take seconds to start"
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def page(run: RunFolder, width: int | None = None, encoding: str = "utf-8") -> str:
    """What is shown in a file, or on a terminal of this width, without colours."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    detail = RunDetail.read(run)
    spec = None if detail.job is None else detail.job.spec
    advice = advise(detail.record, spec, detail.checkpoints, as_typed(run.path))
    print_run(Page(stream, is_terminal=False, width=width), detail, advice, NOW)
    stream.flush()
    return raw.getvalue().decode(encoding)


def rows(text: str) -> dict[str, str]:
    """The rows of a page in a file, by label; of equal labels the first."""
    found: dict[str, str] = {}
    for label, value in re.findall(r"^  (\S.{12})(\S.*)$", text, re.MULTILINE):
        found.setdefault(label.strip(), value)
    return found


def test_compressed_gradients_are_told_with_what_they_would_be(runs: Path) -> None:
    run = complete_run(runs)
    for sent in (0, 50_000):
        told = GradientsCompressed(
            step=1,
            lane_bytes=50_000,
            lane_bytes_dense=4_000_000,
            sent_bytes=sent,
            received_bytes=sent,
            sent_bytes_dense=4_000_000,
        )
        with run.events_file.open("a") as file:
            file.write(told.to_json() + "\n")
        shown = rows(page(run))["gradients"]
        assert shown.startswith("50 kB of each lane, 80 times as much (4 MB) without compression")
        assert ("a worker sends 50 kB a step and receives 50 kB, 4 MB each way without" in shown) == bool(sent)


def test_a_complete_run_from_top_to_bottom(runs: Path) -> None:
    run = complete_run(runs, overrides=[Override("workers", 2, "--workers")])
    keep_source(run.path, TaskSource("task.py", {"task.py": b"", "nets.py": b"", "a/b.py": b""}), None)
    text = page(run)
    assert text.startswith("tiny-0001  complete  8/8 steps\n  created")
    shown = rows(text)
    assert shown["created"].endswith("(3 minutes ago)")
    assert shown["took"] == "3.5 s"
    assert shown["speed"] == "80 samples/s; 0.1 s a step (compute 50%)"
    assert (shown["best"], shown["metrics"]) == ("loss 0.5000 at step 8", "loss 0.5000")
    assert shown["task"] == "task.py:Tiny, 4 lanes on 2 workers"
    assert shown["source"] == "kept in source/: task.py, a/b.py, nets.py"
    assert (shown["weights"], shown["folder"]) == ("ab" * 32, str(run.path))
    assert shown["next"] == "quorate resume tiny-0001 --steps 16"
    assert shown["recorded"] == "8 steps, 2 evaluations, 1 generation"
    assert shown["generation"] == "1.1, 2 workers: worker 0 lanes 0-1; worker 1 lanes 2-3"
    assert shown["timing"] == "failure_timeout 5 s, so heartbeat 0.5 s, lease 4 s, connect 10 s"
    assert shown["machine"] == "torch 2.13.0, python 3.11.7"
    assert shown["digests"] == "canary efefefefefef, dataset 010101010101, task source cdcdcdcdcdcd"
    assert "  step-00000008-evaluated  300 B\n" in text
    assert not [line for line in text.splitlines() if line.endswith(" ")]


def test_what_the_task_has_logged_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().begin().train(1, 4, log={"accuracy": 0.5}).train(5, 8, log={"accuracy": 0.75})
    run = complete_run(runs, story=story)
    text = page(run)
    assert rows(text)["accuracy"] == "▁▁▁▁████"
    assert "first 0.5000, last 0.7500" in text, text
    app(["show", "last", "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    validate("show", document)
    ((name, last),) = [(curve["name"], curve["last"]) for curve in document["logged"]]
    assert (name, last) == ("accuracy", 0.75)


def test_the_best_that_was_not_saved_is_told_with_the_nearest_that_was(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story().begin(total_steps=140).train(1, 2).evaluate(100, loss=0.5).evaluate(120, loss=0.25)
    run = build_run(runs, story=story.evaluate(140, loss=0.375))
    best = "loss 0.2500 at step 120"
    assert rows(page(run))["best"] == f"{best} (not saved)"
    add_checkpoint(run, 140)
    add_checkpoint(run, 100)
    assert rows(page(run))["best"] == f"{best} (not saved; nearest saved: step 100)"
    (run.checkpoints / "step-00000100-evaluated" / "state.safetensors").unlink()
    assert rows(page(run))["best"] == f"{best} (not saved; nearest saved: step 140)"
    app(["show", "last", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["best"]["nearest_saved"] == 140
    add_checkpoint(run, 120)
    assert rows(page(run))["best"] == best


def test_sections_stand_in_order_of_importance(runs: Path) -> None:
    headings = re.findall(r"^(\S.*)$", page(complete_run(runs)), re.MULTILINE)[1:]
    assert headings == [
        "training",
        "evaluation",
        "checkpoints",
        "events",
        "job: affects results",
        "job: runtime only",
        "what else the bits depend on",
    ]


def test_the_job_by_meaning_and_manner_with_origins(runs: Path) -> None:
    keys = {"params": {"rate": 0.1}, "checkpoint": {"every": 2}}
    text = page(build_run(runs, job=keys, overrides=[Override("workers", 2, "--workers")]))
    _, meaning, manner = re.split(r"^job: .*$", text, flags=re.MULTILINE)
    assert re.search(r"^  params\.rate +0\.1 +job\.yaml line 1$", meaning, re.MULTILINE)
    assert "by default   threads 1, epochs null, seed 0" in meaning
    assert re.search(r"^  workers +2 +--workers$", manner, re.MULTILINE)
    assert re.search(r"^  checkpoint\.every +2 +job\.yaml line 1$", manner, re.MULTILINE)
    assert "checkpoint.keep 3" in rows(manner)["by default"]


def test_curves_of_losses_and_metrics(runs: Path) -> None:
    text = page(build_run(runs, story=Story().begin().train(1, 8).evaluate(4, accuracy=0.5).evaluate(8, accuracy=0.75)))
    assert "  loss         █▄▂▂▁▁▁▁\n               first 1.000, last 0.1250, min 0.1250, max 1.000\n" in text
    assert "  accuracy     ▁█\n" in text


def test_a_steep_curve_is_drawn_by_its_logarithm(runs: Path) -> None:
    text = page(
        build_run(runs, story=Story().begin().train(1, 1, loss=1000.0).train(2, 2, loss=10.0).train(3, 3, loss=0.1))
    )
    assert "  loss         █▅▁\n" in text
    assert "drawn by its logarithm" in text


def test_a_single_value_is_no_curve(runs: Path) -> None:
    assert "\nevaluation\n  loss         0.7500\n" in page(
        build_run(runs, story=Story().begin().train(1, 1).evaluate(1, loss=0.75))
    )


def test_a_failed_run_says_why_and_what_to_type(runs: Path) -> None:
    failure = Failure(
        "UserCodeError", "worker 1, lane 2, step 5: ValueError", traceback="Traceback:\n  line 3\nValueError"
    )
    run = build_run(runs, story=Story().begin().train(1, 4), result={"status": "failed", "failure": failure.to_dict()})
    add_checkpoint(run, 4)
    text = page(run)
    shown = rows(text)
    assert text.startswith("tiny-0001  failed  4/8 steps\n  failure      worker 1, lane 2, step 5: ValueError\n  next")
    assert shown["next"] == "quorate resume tiny-0001 --branch"
    assert text.endswith("\ntraceback\n  Traceback:\n    line 3\n  ValueError\n")


def test_a_lost_run_says_so_once(runs: Path) -> None:
    story = Story().begin().train(1, 4)
    silent = page(build_run(runs, story=story))
    assert "why          it was killed together with its launcher" in silent
    assert "took         6 s, as far as is known" in silent
    failure = autopsy_of_launcher()
    told = page(build_run(runs, story=story.tell("failure", 4, cause=failure.kind, message=failure.message)))
    assert f"failure      {failure.message}" in told
    assert "killed together" not in told
    assert "nothing was saved to resume from" in told
    assert "quorate resume" not in told, "one advice, which knows whether there is a checkpoint"


def test_a_run_in_several_parts(runs: Path) -> None:
    story = Story().begin().train(1, 4).tell("stop", reason="interrupted").pause(1000).begin(from_step=2).train(3, 8)
    text = page(build_run(runs, story=story, result=COMPLETE))
    assert rows(text)["took"] == "11 s of training, in 2 parts"
    assert "2 steps repeated after resuming from a checkpoint" in text
    assert rows(text)["stop"] == "interrupted"


def test_how_a_gpu_was_used_is_shown_as_the_result_has_it(runs: Path) -> None:
    memory = {"allocated_bytes": 2**34, "reserved_bytes": 2**35, "total_bytes": 2**37}
    used = {"computed_by": "NVIDIA H200, bf16, captured", "device_memory": memory}
    shown = rows(page(build_run(runs, story=whole_story(), result=COMPLETE | used)))
    assert shown["computed by"] == "NVIDIA H200, bf16, captured"
    assert shown["memory"] == "16.0 of 128.0 GiB on the GPU, 32.0 with what PyTorch keeps for later"
    on_a_cpu = rows(page(build_run(runs, story=whole_story(), result=COMPLETE | {"device_memory": [1]})))
    assert not on_a_cpu.keys() & {"computed by", "memory"}


def test_a_damaged_run_shows_what_is_left(runs: Path) -> None:
    run = complete_run(runs)
    run.job_file.write_text("[")
    (run.checkpoints / "step-00000008-evaluated" / "state.safetensors").unlink()
    with run.events_file.open("a") as events:
        events.write('{"kind": "st')
    text = page(run)
    assert text.startswith(f"tiny-0001  damaged  8/8 steps\n  why          {run.path}/job.yaml is not YAML")
    assert "1 line of events.jsonl" in text
    assert re.search(r"step-00000008-evaluated +300 B +state\.safetensors cannot be read", text)
    assert "job: meaning" not in text
    assert "next" not in rows(text)


@pytest.mark.parametrize("width", [80, 40])
def test_it_fits_the_terminal_but_for_what_is_copied_whole(runs: Path, width: int) -> None:
    story = Story().begin().train(1, 300).evaluate(4, loss=0.75, accuracy=0.5).tell("failure", 300, message="w " * 60)
    run = build_run(runs, story=story, job={"params": {"text": "long " * 30}})
    add_checkpoint(run, 4)
    whole = ("next", "folder", "weights")
    too_long = [
        line
        for line in page(run, width).splitlines()
        if len(line) > width and not line.startswith(tuple(f"  {label}" for label in whole))
    ]
    assert too_long == []


def test_a_stream_without_blocks_gets_a_curve_all_the_same(runs: Path) -> None:
    assert "  loss         #-..____\n" in page(complete_run(runs), encoding="ascii")


def test_a_running_run_tells_where_it_is_and_keeps_its_secret(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_run(runs, story=Story().begin().train(1, 4))
    run.write_address("127.0.0.1:4000", SECRET)
    with run.lock():
        app(["show", "last"], standalone_mode=False)
        text = capsys.readouterr().out
        app(["show", "last", "--json"], standalone_mode=False)
        document = json.loads(capsys.readouterr().out)
    pid = run.lock_file.read_text().strip()
    assert text.startswith("tiny-0001  running  4/8 steps\n")
    assert rows(text)["launcher"] == f"process {pid}; its coordinator listens on 127.0.0.1:4000"
    assert rows(text)["next"] == "quorate stop tiny-0001"
    validate("show", document)
    assert (document["launcher_pid"], document["coordinator"]) == (int(pid), "127.0.0.1:4000")
    assert SECRET not in text + json.dumps(document)


def test_an_address_that_a_killed_run_has_left_is_not_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_run(runs, story=Story().begin().train(1, 4))
    run.write_address("127.0.0.1:4000", SECRET)
    app(["show", "last", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["coordinator"] is None
    assert "4000" not in page(run)


def test_json_is_by_its_schema_whatever_the_run_looks_like(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_run(runs)
    failure = Failure("WorkerLost", "worker 1 was killed", worker=1, step=5).to_dict()
    story = Story().begin().train(1, 4).evaluate(4, loss=float("nan")).tell("stop", reason="terminated")
    build_run(runs, story=story.tell("failure", 4, message="x"), result={"status": "failed", "failure": failure})
    broken = complete_run(runs)
    broken.job_file.write_text("[")
    (broken.checkpoints / "step-00000008-evaluated" / "manifest.json").write_text("{")
    build_run(runs)
    for name in ("tiny-0001", "tiny-0002", "tiny-0003", "tiny-0004"):
        monkeypatch.setattr(output, "_printed_on", WeakSet())  # each is a command of its own
        app(["show", name, "--json"], standalone_mode=False)
        out, err = capsys.readouterr()
        document = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        validate("show", document)
        assert (document["run"], err) == (name, "")


@pytest.mark.parametrize("reference", ["tiny-0002", "tiny-9"])
def test_a_run_that_is_not_there_is_refused(runs: Path, reference: str) -> None:
    complete_run(runs)
    with pytest.raises(RunError, match=f"there is no run '{reference}'.*tiny-0001"):
        app(["show", reference], standalone_mode=False)


def test_a_run_is_named_as_it_is_typed_here(runs: Path) -> None:
    assert as_typed(runs / "tiny-0001") == as_typed(Path("runs/tiny-0001")) == "tiny-0001"
    assert as_typed(Path("/other place/tiny-0001")) == "'/other place/tiny-0001'"


def test_more_than_a_screen_can_hold_is_left_to_json(runs: Path) -> None:
    members = [{"worker": worker, "lanes": [worker]} for worker in range(20)]
    story = Story().tell("generation", generation="1.1", members=members)
    run = build_run(runs, story=story.tell("generation", generation="2.1", members="?").begin().train(1, 1))
    for step in range(1, 12):
        add_checkpoint(run, step)
    text = page(run)
    assert "worker 15 lane 15; 4 more workers" in text.replace("\n", " ").replace("  ", "")
    assert "2.1, 0 workers: nobody (after 1 s)" in text
    assert "  3 older ones; --json has all\n  step-00000004-evaluated" in text


def test_advice_without_a_command_is_a_sentence(runs: Path) -> None:
    detail = RunDetail.read(build_run(runs))
    stream = io.StringIO()
    print_run(Page(stream, is_terminal=False), replace(detail, environment={}), Advice(None, "have a rest"), NOW)
    assert rows(stream.getvalue())["next"] == "have a rest"
    assert "what else" not in stream.getvalue()


def test_the_command_shows_a_run_that_was_trained_without_torch(finished: Path) -> None:
    code = NO_TORCH.format(arguments=["show", "tiny", "--runs", str(finished / "runs"), "--json"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    validate("show", document)
    assert (document["status"], document["steps"], document["workers"]) == ("complete", 8, 2)
    assert {"canary", "dataset", "layout", "task source", "torch", "processor"} <= document["environment"].keys()
    job = {each["key"]: each for each in document["job"]}
    assert job["workers"] == {"key": "workers", "value": 2, "origin": "--workers", "mark": "runtime only"}
    assert re.fullmatch(r"job\.yaml line \d+", job["lanes"]["origin"])
    assert document["losses"][0]["count"] == 8
    assert [each["problem"] for each in document["checkpoints"]] == [None] * 3
    assert document["events"]["generations"][0]["members"][1]["lanes"] == [2, 3]
    assert document["pace"]["shares"].keys() == {"data", "compute", "exchange", "apply"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, ""),
        ({"encrypt": True}, "encrypted"),
        ({"engine": "ray"}, "encrypted between hosts"),
        ({"engine": "ray", "encrypt": False}, ""),
        ({"engine": "ray", "strategy": "ddp"}, "encrypted with the coordinator"),
    ],
)
def test_what_is_encrypted_is_told(keys: dict[str, Any], told: str) -> None:
    job = {"version": 2, "name": "a", "task": "task.py:A", "lanes": 4, "batch_size": 8, "steps": 8, **keys}
    words = encryption_in_words(resolve_mapping(job, "job.yaml", {}, []).spec)
    assert words.startswith(told) and bool(words) == bool(told)


def test_learning_curves_are_drawn_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().begin().train(1, 30, log={"accuracy": 0.5, "own": 2.0}).evaluate(30, loss=0.5, accuracy=0.25)
    run = complete_run(tmp_path, story=story)
    for name in ("curves.svg", "curves.png"):
        app(["show", str(run.path), "-o", str(tmp_path / name)], standalone_mode=False)
        told = capsys.readouterr().out.replace("\n", "")
        assert f"{name}: Training loss, " in told and "Evaluation: accuracy" in told and "own" in told
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f"{run.name}: {name}" in drawn for name in ("Training loss", "Evaluation: loss", "accuracy", "own"))
    app(["show", str(run.path), "-o", str(tmp_path / "curves.svg"), "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    validate("show", document)
    assert document["plot"] == str(tmp_path / "curves.svg")


def test_of_a_run_without_steps_nothing_is_drawn(tmp_path: Path) -> None:
    run = complete_run(tmp_path, story=None)
    with pytest.raises(RunError, match="has no step yet, so there is nothing to draw"):
        app(["show", str(run.path), "-o", str(tmp_path / "curves.svg")], standalone_mode=False)
