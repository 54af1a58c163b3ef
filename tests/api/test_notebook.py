"""A real notebook, in a real kernel."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from command import TASK_SOURCE, Workplace

JOB = "lanes=4, batch_size=8, workers=2, failure_timeout=3.0"
TRAIN = f"""
import quorate
from tiny import Tiny
result = quorate.train(quorate.Job(task=Tiny, steps=8, {JOB}))
"""
MODEL = """
assert type(result.load_model()).__name__ == "Sequential"
result
"""
IN_A_CELL = f"""
class Mine(Tiny):
    pass
quorate.train(quorate.Job(task=Mine, steps=8, {JOB}))
"""
INTERRUPTED = f"""
import os, pathlib, signal, threading, time

def interrupt_after_a_step():
    events = pathlib.Path("runs/tiny-0002/events.jsonl")
    while not (events.exists() and '"kind":"step"' in events.read_text()):
        time.sleep(0.02)
    os.killpg(0, signal.SIGINT)  # what the notebook's stop button does

os.environ["PAUSE"] = "0.1"
threading.Thread(target=interrupt_after_a_step, daemon=True).start()
quorate.train(quorate.Job(task=Tiny, steps=1000, {JOB}))
"""
AFTERWARDS = 'print(quorate.open_run("last"))'
CELLS = ["%%writefile tiny.py\n" + TASK_SOURCE, TRAIN, MODEL, IN_A_CELL, INTERRUPTED, AFTERWARDS]


class Reader(NotebookClient):
    """Executes a notebook and keeps every state of its displays."""

    def __init__(self, notebook: Any, folder: Path) -> None:
        super().__init__(
            notebook,
            timeout=200,
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        self.states: list[str] = []

    def process_message(self, message: Any, *place: Any) -> Any:
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.states.append(message["content"]["data"]["text/plain"])
        return super().process_message(message, *place)


def notebook_of(cells: list[str]) -> Any:
    fields: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    content = [{**fields, "id": f"cell-{number}", "source": cell} for number, cell in enumerate(cells)]
    page = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": content}
    return nbformat.from_dict(page)  # type: ignore[no-untyped-call]


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output["output_type"] == kind]


@pytest.mark.long
def test_a_notebook_trains_in_one_display_refuses_a_class_in_a_cell_and_survives_its_stop_button(
    workplace: Workplace, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    own = tmp_path_factory.mktemp("jupyter")
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(own / variable.lower()))
    notebook = notebook_of(CELLS)
    reader = Reader(notebook, workplace.folder)
    reader.execute()
    _, trained, model, in_a_cell, interrupted, afterwards = notebook.cells

    (shown,) = trained.outputs  # one place, changed again and again, and nothing beside it
    first, *_, before_last, last = reader.states[: reader.states.index(shown["data"]["text/plain"]) + 1]
    assert first == "starting tiny-0001: 4 lanes on 2 workers ..."
    assert before_last.splitlines()[0] == "tiny-0001 in runs/tiny-0001: 4 lanes on 2 workers"
    assert before_last.splitlines()[-1].startswith("step 8/8   loss ")
    assert last.splitlines()[:2] == ["run      tiny-0001", "status   complete"]
    assert f"<tr><th>weights</th><td>{undisturbed}</td></tr>" in shown["data"]["text/html"]

    (result,) = outputs(model, "execute_result")
    assert result["data"]["text/plain"].startswith("<Result tiny-0001: complete, 8 steps, loss ")
    (refusal,) = outputs(in_a_cell, "error")
    assert refusal["ename"] == "TaskError"
    assert "%%writefile mine.py" in refusal["evalue"]

    (stop,) = outputs(interrupted, "error")
    assert stop["ename"] == "KeyboardInterrupt"
    assert 'quorate.resume("tiny-0002") resumes it' in stop["evalue"]
    (alive,) = outputs(afterwards, "stream")
    assert alive["text"].startswith("<Result tiny-0002: interrupted, ")
    assert workplace.checkpoints()
