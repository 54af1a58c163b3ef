"""The script of docs/how-to/own-loop.md is one that runs, on any number of workers to the same bits."""

import re
from pathlib import Path

import pytest

import gang
from quorate.own_loop.run import Run
from quorate.task.source import load_task_type

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/own-loop.md").read_text()


@pytest.mark.long
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(block)
    task = load_task_type(f"{script}:main", 0)
    digests = set()
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        ended = gang.train(task, gang.job(task, batch_size=64, epochs=3), workers, folder)
        assert len(ended.losses) == 30
        digests.add(ended.digest)
    assert len(digests) == 1


def test_the_page_tells_of_every_call_and_of_no_other() -> None:
    told = set(re.findall(r"\brun\.(\w+)", PAGE))
    assert told == {name for name in vars(Run) if not name.startswith("_")}
