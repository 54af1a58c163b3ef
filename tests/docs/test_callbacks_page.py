"""The callback of docs/how-to/callbacks.md has every hook, and gets what the page says."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from quorate.api.callbacks import Callback, Checkpoint, End, EvaluationEnd, Start, StepEnd

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/callbacks.md").read_text()
RECORDS = {
    "on_start": Start,
    "on_step_end": StepEnd,
    "on_evaluation": EvaluationEnd,
    "on_checkpoint": Checkpoint,
    "on_end": End,
}


def test_the_page_tells_of_every_hook_and_of_all_that_it_gets() -> None:
    rows = re.findall(r"^\| `(on_\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    told = {hook: re.findall(r"`(\w+)`", fields) for hook, fields in rows}
    assert told == {hook: [each.name for each in dataclasses.fields(kind)] for hook, kind in RECORDS.items()}
    assert told.keys() == {name for name in vars(Callback) if name.startswith("on_")}


def test_the_callback_of_the_page_runs(capsys: Any) -> None:
    space: dict[str, Any] = {}
    block = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    exec(block, space)
    tell = space["Tell"]()
    for hook, kind in RECORDS.items():
        values: dict[str, Any] = {each.name: 100 if each.name == "step" else {} for each in dataclasses.fields(kind)}
        getattr(tell, hook)(kind(**values))
    assert len(capsys.readouterr().out.splitlines()) == 5
