"""What docs/how-to/metrics.md shows runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from quorate.task.source import load_task_type

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/metrics.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_task_of_the_page_gives_one_auroc_on_any_number_of_workers(tmp_path: Path) -> None:
    script = tmp_path / "tumours.py"
    script.write_text(BLOCKS[0])
    task = load_task_type(f"{script}:Tumours", 0)
    found = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        ended = gang.train(task, gang.job(task, batch_size=40, epochs=2), workers, folder)
        found.append((ended.progress["metrics"], ended.digest))
    assert found[0] == found[1]
    assert found[0][0]["auroc"] > 0.9


def test_the_f1_of_the_page_is_that_of_all_batches() -> None:
    space: dict[str, Any] = {}
    exec(BLOCKS[-1], space)
    predicted, labels = torch.tensor([True, True, False, True]), torch.tensor([True, False, True, True])
    whole, merged = space["F1"](predicted, labels), space["F1"](predicted[:0], labels[:0])
    for each in (slice(0, 2), slice(2, 4)):
        merged.merge_state(space["F1"](predicted[each], labels[each]).metric_state)
    assert merged.compute() == whole.compute() == pytest.approx(2 / 3)
