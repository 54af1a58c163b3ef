"""An exception anywhere in user code, in workers that are forked from the test itself."""

import re
from pathlib import Path

import pytest

import command_task
import gang

PLACES = {
    "model": (r"trouble in model \(in model\(\)\)", "model", 0),
    "datasets": (r"trouble in datasets \(in datasets\(\)\)", "datasets", 0),
    "sample": (r"trouble in sample \(in sample 5 of the training set\)", "__getitem__", None),
    "collate": (r"trouble in collate \(in collate\(\)\)", "collate", 1),
    "loss": (r"trouble in loss \(in loss\(\)\)", "loss", 5),
    "late refusal": (r"TaskError: the task has changed its mind \(in loss\(\)\)", "loss", 5),
    "backward": (r"trouble in backward \(in backward\(\)\)", "<lambda>", 5),
    "optimizer step": (r"trouble in optimizer step \(in optimizer\.step\(\)\)", "step", 1),
    "metrics": (r"trouble in metrics \(in metrics\(\)\)", "metrics", 4),
    "sys.exit": (r"SystemExit: the task has had enough \(in loss\(\)\)", "loss", 5),
}


@pytest.mark.parametrize("trouble", PLACES)
def test_an_exception_is_told_with_its_place_and_the_users_own_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    sentence, function, step = PLACES[trouble]
    monkeypatch.setattr(command_task, "TROUBLE", trouble)
    # Without audits: it counts how often it is called.
    spec = gang.job(command_task.Tiny, batch_size=8, steps=8, audit={"every": 0})
    failure = gang.train(command_task.Tiny, spec, 2, tmp_path).failure
    assert failure.kind == "UserCodeError"
    assert not failure.is_refusal
    assert re.search(sentence, failure.message)
    assert step is None or failure.step == step
    in_lane = trouble in ("sample", "collate", "loss", "late refusal", "backward", "sys.exit")
    assert (failure.lane is not None) == in_lane
    frame = failure.traceback.partition("Traceback (most recent call last):\n")[2].split("\n")[0]
    assert frame.startswith(f'  File "{command_task.__file__}", line ')
    assert frame.endswith(f", in {function}")
    assert failure.traceback.count("Traceback") == 1
