"""Each pattern for a loop of one's own, as it stands on its page: the same bits on any number of workers."""

from pathlib import Path
from typing import Any

import pytest

from docs.blocks import blocks_of
from quorate.own_loop.loop import own_loop_of
from training.recorded import run

BEGINNING, *PATTERNS = [block.text for block in blocks_of("docs/how-to/own-loop-patterns.md")]
KEYS: dict[str, Any] = {"lanes": 4, "batch_size": 32, "epochs": 4, "checkpoint": {"every": 4}}


def test_there_are_twelve() -> None:
    assert len(PATTERNS) == 12


@pytest.mark.parametrize(
    "text",
    [
        # The others with the long tests: rates by the epoch, the average, and what is carried in time stand for them.
        pytest.param(text, id=str(number), marks=() if number in (1, 4, 9) else pytest.mark.long)
        for number, text in enumerate(PATTERNS, 1)
    ],
)
def test_a_pattern_has_the_same_bits_on_any_number_of_workers_and_after_a_resume(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "pattern"}
    exec(BEGINNING + text, names)
    task = own_loop_of(names["main"])
    whole = run(task, tmp_path / "one", 1, **KEYS)
    assert whole.ended.ending == "complete", whole.ended.failure
    assert run(task, tmp_path / "stopped", 4, stop_at=14, **KEYS).ended.ending == "interrupted"
    assert run(task, tmp_path / "stopped", 3, **KEYS).ended.digest == whole.ended.digest
    if "log.csv" in text:
        assert len(set(Path("log.csv").read_text().splitlines())) == 24, "the rows of a step are the same each time"
        assert Path("best.pt").exists()
