"""The ported scripts: few lines differ from what they were, and any number of workers comes to the same bits."""

import difflib
import re
from pathlib import Path
from typing import Any

import pytest

import gang
from examples.example_files import EXAMPLES
from quorate.task.source import load_task_type

PORTED = EXAMPLES / "ported"
README = (PORTED / "README.md").read_text()
KEYS: dict[str, dict[str, Any]] = {
    "lightning_digits": {"batch_size": 64, "steps": 24, "evaluate": {"metric": "val_loss"}},
    "accelerate_text": {"batch_size": 64, "steps": 12, "accumulate": 2},
    "nanogpt": {"batch_size": 8, "steps": 4, "evaluate": {"every": 2}},
}
MOST_CHANGED = 30


@pytest.mark.parametrize("name", KEYS)
def test_few_lines_are_changed_and_the_page_says_how_many(name: str) -> None:
    before, after = ((folder / f"{name}.py").read_text().splitlines() for folder in (PORTED / "before", PORTED))
    changed = sum(line.startswith("+ ") for line in difflib.ndiff(before, after))
    told = re.search(rf"\[{name}\.py\].*, (\d+) lines \| (\d+) \|", README)
    assert told is not None
    assert (int(told[1]), int(told[2])) == (len(before), changed)
    assert changed <= MOST_CHANGED


TASK = "lightning_digits_task.py:LitDigitsTask"


@pytest.mark.long
@pytest.mark.parametrize("name", [*KEYS, TASK])
def test_any_number_of_workers_comes_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 40)
    monkeypatch.setenv("TEXT", str(text))
    task = load_task_type(str(PORTED / (name if name == TASK else f"{name}.py:main")), 0)
    keys = KEYS[name.partition("_task")[0]]
    digests = set()
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        ended = gang.train(task, gang.job(task, **keys), workers, folder)
        assert ended.losses[-1] < ended.losses[0]
        digests.add(ended.digest)
    assert len(digests) == 1
