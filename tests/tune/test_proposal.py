"""A space that is proposed from a task's params, and values that the task would refuse."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

from quorate.core.errors import JobFileError, RequestError, UserCodeError
from quorate.spec.load import load_job
from quorate.tune.loading import ResolvedSearch, dump_search, read_mapping, read_search
from quorate.tune.proposal import proposal_lines, propose, refuse_unreported, with_task
from quorate.tune.spec import SearchSpec

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
    return with_task(read_search(folder / "find.yaml", {}))


PROPOSALS: dict[str, tuple[Any, Any, dict[str, Any] | None]] = {
    "learning_rate": (float, 0.1, {"loguniform": [0.01, 1.0]}),
    "head_lr": (float, 3e-4, {"loguniform": [3e-5, 3e-3]}),
    "weight_decay": (float, 0.0, {"loguniform": [1e-6, 1e-2]}),
    "momentum": (float, 0.9, {"uniform": [0.5, 0.99]}),
    "dropout": (float, 0.25, {"uniform": [0.0, 0.5]}),
    "label_smoothing": (float, 0.1, {"uniform": [0.0, 0.2]}),
    "temperature": (float, 2.0, {"loguniform": [0.667, 6.0]}),
    "keep": (float, 0.5, {"loguniform": [0.167, 1.0]}),
    "offset": (float, 0.0, None),
    "hidden": (int, 48, {"choice": [24, 48, 96]}),
    "layers": (int, 2, {"randint": [1, 3]}),
    "classes": (int, 10, None),
    "vocab_size": (int, 65, None),
    "heads": (int, 4, None),
    "bias": (bool, True, {"choice": [False, True]}),
    "shape": (Literal["round", "square"], "round", {"choice": ["round", "square"]}),
    "path": (str, "data", None),
    "unset": (float, ..., None),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_what_is_proposed_for_a_name(name: str) -> None:
    kind, default, expected = PROPOSALS[name]
    proposed = propose({name: (kind, default)}, {})
    told = {key: each.model_dump(exclude_none=True) for key, each in proposed.items()}
    assert told == ({} if expected is None else {f"params.{name}": expected})


def test_the_value_in_the_job_counts() -> None:
    proposed = propose({"lr": (float, 0.1), "width": (int, 8)}, {"lr": 0.002})
    assert (proposed["params.lr"].loguniform, proposed["params.width"].choice) == ([2e-4, 0.02], [4, 8, 16])


def test_what_changes_on_the_way_keeps_the_shape_of_the_model() -> None:
    fields = {"lr": (float, 0.1), "width": (int, 8), "bias": (bool, True)}
    assert list(propose(fields, {}, changes_on_the_way=True)) == ["params.lr"]


def test_a_job_file_alone_gets_a_space_that_can_be_shown(folder: Path) -> None:
    search = with_task(read_search(folder / "digits.yaml", {}))
    assert proposal_lines(search) == [
        "params.learning_rate: {loguniform: [0.01, 1.0]}",
        "params.width:         {choice: [16, 32, 64]}",
        "params.depth:         {randint: [1, 3]}",
        "params.shape:         {choice: [round, square]}",
    ]
    assert "proposed from Digits.width" in dump_search(search)
    assert search.trial_job(search.spec.params(1), 1).spec.params["needed"] == 3


def test_a_space_that_was_written_is_not_proposed(folder: Path) -> None:
    search = opened(folder, "{params.width: {choice: [4, 8]}}")
    assert list(search.spec.space or {}) == ["params.width"]
    assert proposal_lines(search) == []


def test_a_space_that_is_proposed_keeps_the_rules_too(folder: Path) -> None:
    (folder / "find.yaml").write_text("job: digits.yaml\nalgorithm: grid\n")
    with pytest.raises(JobFileError) as caught:
        with_task(read_search(folder / "find.yaml", {}))
    assert [str(problem) for problem in caught.value.problems] == [
        "budget: nothing ends the search. Write budget: {trials: 20}, or minutes or steps of all trials together.",
        "space.params.learning_rate: algorithm: grid needs a list of values, and a loguniform (proposed from "
        "Digits.learning_rate) has no end. Write grid: [0.1, 0.01], or give the range a step.",
    ]


def test_nothing_to_propose(folder: Path) -> None:
    (folder / "digits.py").write_text(
        "\n".join(line for line in TASK.splitlines() if ":" not in line or "def" in line or "class" in line)
    )
    (folder / "digits.yaml").write_text(JOB.replace("params: {needed: 3}\n", ""))
    with pytest.raises(RequestError, match="none can be proposed: Digits has no typed params"):
        with_task(read_search(folder / "digits.yaml", {}))


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
    search = read_mapping({"space": {"params.width": {"choice": ["wide"]}}, **keys}, "Search(...)", {}, job)
    with pytest.raises(JobFileError, match=r'space.params.width: the text "wide" is not a whole number'):
        with_task(search)
    proposed = with_task(read_mapping(keys, "Search(...)", {}, job)).spec.space
    assert "params.learning_rate" in (proposed or {})


def test_a_metric_that_is_not_reported(folder: Path) -> None:
    search = opened(folder, "{params.width: {choice: [4]}}", "metric: acuracy\nmode: max\n")
    with pytest.raises(JobFileError, match=r"reports no acuracy .find.yaml line 4.. Did you mean accuracy"):
        refuse_unreported(search, ["loss", "accuracy"])
    refuse_unreported(search, ["acuracy"])


def test_a_param_that_changes_the_model_is_refused_for_a_population(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.tune.proposal.find_spec", lambda _: "as if Ray were installed")
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
    search = with_task(read_search(folder / "digits.yaml", {}), lambda _: done.append("meanwhile"))
    importers = marker.read_text().split()
    assert len(importers) == 1 and importers != [str(os.getpid())]
    assert done and search == with_task(read_search(folder / "digits.yaml", {}))
    assert "params.learning_rate" in (search.spec.space or {})


def test_what_another_process_refuses_is_refused_here(folder: Path) -> None:
    (folder / "find.yaml").write_text("job: digits.yaml\nbudget: {trials: 4}\nspace: {params.width: {choice: [x]}}\n")
    with pytest.raises(JobFileError, match=r"space\.params\.width"):
        with_task(read_search(folder / "find.yaml", {}), lambda _: None)
    (folder / "digits.py").write_text("raise ValueError('it cannot be imported')\n")
    with pytest.raises(UserCodeError, match="it cannot be imported"):
        with_task(read_search(folder / "find.yaml", {}), lambda _: None)


def test_a_task_that_ends_the_process_which_asks_it_is_asked_here(folder: Path) -> None:
    ended = f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(3)\n"
    (folder / "digits.py").write_text(f"{ended}{TASK}")
    search = with_task(read_search(folder / "digits.yaml", {}), lambda _: None)
    assert "params.learning_rate" in (search.spec.space or {})


def test_what_ends_a_search_does_not_wait_for_its_task(folder: Path) -> None:
    (folder / "digits.py").write_text(f"import time\ntime.sleep(600)\n{TASK}")

    def interrupted(_: SearchSpec) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_task(read_search(folder / "digits.yaml", {}), interrupted)
    (asked,) = multiprocessing.active_children()
    asked.terminate()  # as this process does when it ends
    asked.join()
    assert asked.exitcode == -signal.SIGTERM
