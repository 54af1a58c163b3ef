import sys
from pathlib import Path

import pytest

import quorate
from history.run_builder import Story, complete_run


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
