import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quorate
from command import Workplace
from command_task import Tiny
from history.run_builder import Story, complete_run
from quorate.storage.run_folder import RunFolder


@pytest.fixture
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a task's file brings into this process is gone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("task", None)


def opened(workplace: Workplace, run: str | Path = "last") -> quorate.Result:
    return quorate.open_run(run, runs=workplace.folder / "runs")


def weight_of(model: torch.nn.Module) -> torch.Tensor:
    return next(model.parameters()).detach()


class TestOpenRun:
    def test_finds_a_run_as_the_command_line_does(self, used_workplace: Workplace, undisturbed: str) -> None:
        result = opened(used_workplace)
        for reference in ("tiny-0001", "tiny", used_workplace.last):
            assert opened(used_workplace, reference) == result
        assert (result.run, result.status, result.steps) == ("tiny-0001", "complete", 8)
        assert (result.weights_digest, result.exit_code, result.error) == (undisturbed, 0, None)
        assert result.fields == used_workplace.result()
        with pytest.raises(quorate.RunError, match="there is no run 'tinny'"):
            opened(used_workplace, "tinny")

    def test_looks_where_the_variable_says(self, used_workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QUORATE_RUNS", str(used_workplace.folder / "runs"))
        monkeypatch.chdir("/")
        assert quorate.open_run() == opened(used_workplace)

    @pytest.mark.parametrize("is_held", [True, False])
    def test_of_a_run_that_has_not_told_its_end_knows_the_newest_checkpoint(
        self, used_workplace: Workplace, undisturbed: str, is_held: bool
    ) -> None:
        (used_workplace.last / "result.json").unlink()
        if is_held:
            with RunFolder(used_workplace.last).lock():
                result = opened(used_workplace)
        else:
            result = opened(used_workplace)
        assert result.status == ("running" if is_held else "lost")
        assert (result.steps, result.weights_digest) == (8, undisturbed)
        assert result.metrics.keys() == {"loss"}

    def test_of_a_run_whose_result_is_cut_off_knows_the_newest_checkpoint_and_warns(
        self, used_workplace: Workplace, undisturbed: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = used_workplace.last / "result.json"
        file.write_text(file.read_text()[:20])
        result = opened(used_workplace)
        assert (result.status, result.steps, result.weights_digest) == ("lost", 8, undisturbed)
        assert f"{file} is not JSON" in caplog.text

    def test_of_a_run_with_a_metric_that_is_not_finite(self, used_workplace: Workplace) -> None:
        fields = used_workplace.result() | {"final_metrics": {"loss": float("inf"), "accuracy": 0.5}}
        RunFolder(used_workplace.last).write_result(fields)
        result = opened(used_workplace)
        assert (math.isnan(result.metrics["loss"]), result.metrics["accuracy"]) == (True, 0.5)
        assert "loss nan, accuracy 0.5000" in repr(result)
        assert "not finite" in result._repr_html_()
        assert result == opened(used_workplace)

    def test_of_a_run_that_failed_and_has_no_checkpoint_any_more(self, used_workplace: Workplace) -> None:
        folder = used_workplace.last
        for checkpoint in (folder / "checkpoints").iterdir():
            checkpoint.rename(folder / checkpoint.name)
        failure = {"kind": "LossError", "message": "the loss is nan"}
        RunFolder(folder).write_result({"run": "tiny-0001", "status": "failed", "failure": failure})
        result = opened(used_workplace)
        assert (result.status, result.steps, result.error, result.exit_code) == ("failed", 0, "the loss is nan", 1)
        assert repr(result) == "<Result tiny-0001: failed, 0 steps>"
        with pytest.raises(quorate.RunError, match="has nothing to load: its events record a checkpoint at step 8"):
            result.load_model()


class TestShown:
    def test_on_one_line(self, used_workplace: Workplace, undisturbed: str) -> None:
        result = opened(used_workplace)
        loss = f"{result.metrics['loss']:.4g}"
        assert repr(result).startswith(f"<Result tiny-0001: complete, 8 steps, loss {loss}")
        assert repr(result).endswith(f", weights {undisturbed[:12]}…>")

    def test_in_a_notebook_as_a_table_in_which_nothing_is_markup(
        self, used_workplace: Workplace, undisturbed: str
    ) -> None:
        result = opened(used_workplace)
        result.fields["final_metrics"] = {"<b>": 1.0}
        table = result._repr_html_()
        assert "<tr><th>status</th><td>complete</td></tr>" in table
        assert f"<tr><th>weights</th><td>{undisturbed}</td></tr>" in table
        assert "<tr><th>&lt;b&gt;</th><td>1.000</td></tr>" in table


class TestLoadModel:
    def test_builds_it_by_the_file_of_the_task(self, used_workplace: Workplace, own_imports: None) -> None:
        model = opened(used_workplace).load_model()
        assert not torch.equal(weight_of(model), weight_of(opened(used_workplace).load_model(6)))

    def test_takes_last_best_or_a_step(self, used_workplace: Workplace) -> None:
        result = replace(opened(used_workplace), task_type=Tiny)
        last, by_step, best = (weight_of(result.load_model(which)) for which in ("last", 8, "best"))
        assert torch.equal(last, by_step)
        assert torch.equal(last, best)  # its loss falls to the end
        with pytest.raises(quorate.RunError, match="no checkpoint of step 5"):
            result.load_model(5)

    def test_moves_it_where_it_is_wanted(self, used_workplace: Workplace) -> None:
        result = replace(opened(used_workplace), task_type=Tiny)
        assert weight_of(result.load_model(map_location="meta")).is_meta


def test_all_numbers_of_a_run_by_step_each_once(tmp_path: Path) -> None:
    story = Story().begin().train(1, 4, log={"accuracy": 0.5}).evaluate(4, loss=0.75, accuracy=0.25)
    story.begin(from_step=2).train(3, 5, log={"accuracy": 0.5})
    run = complete_run(tmp_path, story=story)
    with run.events_file.open("ab") as file:
        file.write(b'{"kind":"step","st')  # as a killed run leaves it
    records = quorate.open_run(run.path).history
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[1] == {
        "step": 2,
        "train/loss": 0.5,
        "train/epoch": 0,
        "train/throughput": 80.0,
        "train/accuracy": 0.5,
    }
    assert (records[3]["val/loss"], records[3]["val/accuracy"]) == (0.75, 0.25)
    assert "val/loss" not in records[4]


def test_of_a_run_that_has_told_nothing_there_is_none(tmp_path: Path) -> None:
    run = complete_run(tmp_path, story=None)
    assert quorate.open_run(run.path).history == []


def test_it_is_a_table_where_pandas_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = complete_run(tmp_path, story=Story().begin().train(1, 2).evaluate(2, accuracy=0.25))
    history = quorate.open_run(run.path).history
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(quorate.RequestError, match="pip install pandas"):
        history.to_dataframe()
    monkeypatch.undo()
    table = history.to_dataframe()
    assert list(table.index) == [1, 2]
    assert table["val/accuracy"].dropna().to_dict() == {2: 0.25}
