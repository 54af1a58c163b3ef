"""A job that waits for its data says so in the end, in `show`, and in both documents."""

import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from history.run_builder import CREATED, Story, build_run
from made_events import make_event
from quorate.cli.layout import Page
from quorate.cli.run_view import print_run
from quorate.core.machine import usable_cores
from quorate.history import run_detail
from quorate.history.documents import detail_document
from quorate.history.run_detail import RunDetail
from quorate.storage.run_folder import finite
from schemas import validate

NOW = CREATED + timedelta(minutes=3)
TASK = """
import time, torch, quorate

class Slow:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        time.sleep(0.04)
        return torch.tensor([float(index)])

class Waiting(quorate.Task):
    def model(self):
        return torch.nn.Linear(1, 1)
    def datasets(self):
        return Slow()
    def loss(self, model, batch):
        return model(batch).square().mean()
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-4)
"""


def test_a_job_that_waits_names_the_knob_in_the_end(workplace: Workplace) -> None:
    (workplace.folder / "slow.py").write_text(TASK)
    (workplace.folder / "slow.yaml").write_text("task: slow.py:Waiting\nbatch_size: 8\nlanes: 2\nsteps: 6\n")
    done = workplace.run("train", "slow.yaml", "--workers", "1")
    assert done.code == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  waiting ")]
    knob = "more loader_workers (now 0)" if usable_cores() > 1 else "more cores (all 1 are in use)"
    assert line.endswith(f"% of a step: {knob} may help")
    shown = workplace.run("show", "last", "--json").document
    validate("show", shown)
    assert shown["waiting_for_data"]["share"] > 0.3
    assert shown["waiting_for_data"]["advice"] == f"{knob} may help"
    result = result_of(workplace)
    validate("train", result)
    assert result["waiting_for_data"]["seconds"] >= 5 * 8 * 0.04


def result_of(workplace: Workplace) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((workplace.runs()[-1] / "result.json").read_text())
    return fields


def shown(runs: Path, data_s: float, **job: object) -> tuple[str, object]:
    story = Story().begin().train(1, 8, data_s=data_s)
    reading = {"remote": True, "window_bytes": 10**9, "memory_bytes": 10**8}
    data = {"blocks": 3, "window": 500, "reading": reading}
    story.events[1] = make_event("run", fields={"data": data}, time=story.events[1].time)
    detail = RunDetail.read(build_run(runs, story=story, job=dict(job)))
    stream = io.StringIO()
    print_run(Page(stream, is_terminal=False), detail, None, NOW)
    return stream.getvalue(), finite(detail_document(detail, None, NOW))["waiting_for_data"]


def test_show_names_what_the_job_is_set_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_detail, "usable_cores", lambda: 64)
    page, document = shown(tmp_path / "runs", 0.45, loader_workers=2)
    advice = (
        "more loader_workers (now 2), a larger loader_prefetch (now 2), cache= of quorate.Shards or a smaller window= "
        "of quorate.Shards (now 500) may help"
    )
    assert document == {"share": 0.9, "seconds": 3.15, "advice": advice}
    assert f"for data, 90% of a step: {advice}" in " ".join(page.split())


def test_show_says_nothing_of_a_little_waiting(tmp_path: Path) -> None:
    page, document = shown(tmp_path / "runs", 0.001)
    assert "of a step" not in page
    assert document == {"share": 0.0196, "seconds": 0.007, "advice": None}
