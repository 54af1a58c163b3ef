"""A search is held against its task: values that the task would refuse, and what it does not report."""

import os
from pathlib import Path

import pytest

from quorate.core.errors import JobFileError, RequestError, UserCodeError
from quorate.spec.load import load_job
from quorate.spec.search_load import ResolvedSearch, resolve_search
from quorate.tune.opening import check_task, open_search, refuse_unreported

TASK = """\
from typing import Literal
import quorate

class Digits(quorate.Task):
    learning_rate: float = 0.1
    width: int = 32
    depth: int = 2
    shape: Literal["round", "square"] = "round"
    needed: int

    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
"""
JOB = "task: digits.py:Digits\nbatch_size: 64\nsteps: 200\nparams: {needed: 3}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").write_text(TASK)
    (tmp_path / "digits.yaml").write_text(JOB)
    return tmp_path


def opened(folder: Path, space: str, more: str = "") -> ResolvedSearch:
    (folder / "find.yaml").write_text(f"job: digits.yaml\nbudget: {{trials: 4}}\nspace: {space}\n{more}")
    return open_search(folder / "find.yaml", {})


SPACE = "{params.width: {choice: [4, 8]}}"


def test_a_job_file_is_no_search_and_a_search_needs_a_space(folder: Path) -> None:
    with pytest.raises(RequestError, match="is a job, not a search"):
        open_search(folder / "digits.yaml", {})
    (folder / "find.yaml").write_text("job: digits.yaml\nbudget: {trials: 4}\n")
    with pytest.raises(JobFileError, match="space: there is nothing to search"):
        open_search(folder / "find.yaml", {})


def test_values_that_the_task_refuses_are_told_with_all_other_mistakes(folder: Path) -> None:
    space = (
        "{params.widht: {choice: [4]}, params.width: {uniform: [4, 8]}, params.depth: {choice: [1, deep]}, "
        "params.shape: {choice: [round, sqare]}, batch_sise: {choice: [4]}}"
    )
    with pytest.raises(JobFileError) as caught:
        opened(folder, space, "seeed: 1\n")
    assert [str(problem) for problem in caught.value.problems] == [
        "seeed: there is no such key (find.yaml line 4). Did you mean seed?",
        "space.batch_sise: there is no such key (find.yaml line 3). Did you mean batch_size?",
        "space.params.widht: there is no such key (find.yaml line 3). Did you mean space.params.width?",
        "space.params.width: 4.0 is not a whole number (find.yaml line 3). Use randint.",
        "space.params.width: 8.0 is not a whole number (find.yaml line 3). Use randint.",
        'space.params.depth: the text "deep" is not a whole number (find.yaml line 3).',
        'space.params.shape: the text "sqare" is not round or square (find.yaml line 3). Did you mean square?',
    ]


def test_a_param_that_neither_the_job_nor_the_space_gives(folder: Path) -> None:
    (folder / "digits.yaml").write_text(JOB.replace("{needed: 3}", "{}"))
    with pytest.raises(JobFileError, match=r"params.needed: it is missing"):
        opened(folder, "{params.width: {choice: [4]}}")
    assert opened(folder, "{params.needed: {randint: [1, 4]}}").spec.trials == 4


def test_a_task_that_cannot_be_imported_comes_after_other_mistakes(folder: Path) -> None:
    (folder / "digits.py").write_text("1 / 0\n")
    with pytest.raises(JobFileError, match="seeed"):
        opened(folder, "{params.width: {choice: [4]}}", "seeed: 1\n")
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        opened(folder, "{params.width: {choice: [4]}}")


def test_a_search_from_a_call_is_checked_too(folder: Path) -> None:
    job = load_job(folder / "digits.yaml", {}, [])
    keys = {"budget": {"trials": 2}, "metric": "loss"}
    search = resolve_search({"space": {"params.width": {"choice": ["wide"]}}, **keys}, "Search(...)", {}, job)
    with pytest.raises(JobFileError, match=r'space.params.width: the text "wide" is not a whole number'):
        check_task(search)


def test_a_metric_that_is_not_reported(folder: Path) -> None:
    search = opened(folder, "{params.width: {choice: [4]}}", "metric: acuracy\nmode: max\n")
    with pytest.raises(JobFileError, match=r"reports no acuracy .find.yaml line 4.. Did you mean accuracy"):
        refuse_unreported(search, ["loss", "accuracy"])
    refuse_unreported(search, ["acuracy"])


def test_a_param_that_changes_the_model_is_refused_for_a_population(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.tune.opening.find_spec", lambda _: "as if Ray were installed")
    (folder / "digits.yaml").write_text(f"{JOB}evaluate: {{every: 50}}\n")
    built = TASK.replace("import quorate\n", "import quorate\nfrom torch import nn\n").replace(
        "def model(self): ...", "def model(self): return nn.Linear(self.width, 2)"
    )
    (folder / "digits.py").write_text(built)
    pbt = "scheduler: {kind: pbt, interval: 50, quantile: 0.5}\nmetric: loss\nmode: min\n"
    rate = "params.learning_rate: {loguniform: [0.01, 1]}"
    with pytest.raises(JobFileError) as refused:
        opened(folder, f"{{{rate}, params.width: {{choice: [16, 64]}}}}", pbt)
    assert "space.params.width" in str(refused.value)
    assert "it changes the shapes of the model's tensors" in str(refused.value)
    assert "space.params.learning_rate" not in str(refused.value)


def test_another_process_answers_the_same_while_this_one_does_something_else(folder: Path) -> None:
    marker = folder / "imported"
    (folder / "digits.py").write_text(
        f"import os\nwith open({str(marker)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n{TASK}"
    )
    done: list[str] = []
    (folder / "find.yaml").write_text(f"job: digits.yaml\nbudget: {{trials: 4}}\nspace: {SPACE}\n")
    search = open_search(folder / "find.yaml", {}, meanwhile=lambda _: done.append("meanwhile"))
    importers = marker.read_text().split()
    assert len(importers) == 1 and importers != [str(os.getpid())]
    assert done and search == open_search(folder / "find.yaml", {})


def test_what_another_process_refuses_is_refused_here(folder: Path) -> None:
    (folder / "find.yaml").write_text("job: digits.yaml\nbudget: {trials: 4}\nspace: {params.width: {choice: [x]}}\n")
    with pytest.raises(JobFileError, match=r"space\.params\.width"):
        open_search(folder / "find.yaml", {}, meanwhile=lambda _: None)
    (folder / "digits.py").write_text("raise ValueError('it cannot be imported')\n")
    with pytest.raises(UserCodeError, match="it cannot be imported"):
        open_search(folder / "find.yaml", {}, meanwhile=lambda _: None)


def test_a_task_that_ends_the_process_which_asks_it_is_asked_here(folder: Path) -> None:
    ended = f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(3)\n"
    (folder / "digits.py").write_text(f"{ended}{TASK}")
    (folder / "find.yaml").write_text(f"job: digits.yaml\nbudget: {{trials: 4}}\nspace: {SPACE}\n")
    search = open_search(folder / "find.yaml", {}, meanwhile=lambda _: None)
    assert "params.width" in (search.spec.space or {})
