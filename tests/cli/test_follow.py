import io
from pathlib import Path

import pytest

from history.run_builder import Story, build_run
from quorate.cli.app import app
from quorate.cli.run_view import follow_run
from quorate.core.errors import RequestError
from quorate.observe.jsonl import JsonlSink
from quorate.observe.screen import Screen
from quorate.storage.run_folder import RunFolder


def add(run: RunFolder, story: Story) -> None:
    sink = JsonlSink(run.events_file)
    for event in story.events:
        sink.handle(event)
    sink.close()


def test_what_a_run_tells_from_now_on_is_shown_until_it_ends(tmp_path: Path) -> None:
    run = build_run(tmp_path, story=Story().begin(total_steps=8).train(1, 4))
    coming = [Story().train(5, 6, log={"accuracy": 0.75}).evaluate(6, loss=0.5), Story().train(7, 8)]
    is_running = True

    def wait(_: float) -> None:
        nonlocal is_running
        add(run, coming.pop(0))
        is_running = bool(coming)

    shown = io.StringIO()
    follow_run(run, Screen(shown, is_terminal=False), lambda: is_running, wait)
    text = shown.getvalue()
    assert coming == []
    assert "step 4/8" not in text  # it was told before
    assert "accuracy 0.7500" in text
    assert "evaluation at step 6: loss 0.5000" in text
    assert "step 8/8   epoch 2/2   loss 0.1250" in text


def test_a_run_that_has_ended_is_only_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_run(tmp_path / "runs", story=Story().begin(total_steps=8).train(1, 4))
    monkeypatch.chdir(tmp_path)
    app(["show", "last", "--follow"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("tiny-0001  lost")
    with pytest.raises(RequestError, match="--follow"):
        app(["show", "last", "--follow", "--json"], standalone_mode=False)
