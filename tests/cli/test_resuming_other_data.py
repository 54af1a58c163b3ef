"""A run whose shards are others when it goes on."""

from pathlib import Path

import pytest

from command import Workplace
from streamed_job import SIZES, SOURCE, keys_of, write_data, write_set

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture
def streamed(tmp_path: Path) -> Workplace:
    """A run of four steps, and other shards than it has read, with an index of them."""
    folder = tmp_path / "streamed"
    folder.mkdir()
    write_data("jsonl", folder)
    place = Workplace(folder)
    place.task.write_text(SOURCE)
    place.write_job(**keys_of("jsonl", epochs=None, steps=4, evaluate={"every": 4}))
    trained = place.train("--json")
    assert trained.code == 0, trained.stderr
    (folder / "train").rename(folder / "before")
    write_set("jsonl", folder / "train", (*SIZES[1:], SIZES[0]))
    return place


def test_another_index_is_refused_with_both_values_and_the_run_is_as_it_was(streamed: Workplace) -> None:
    refused = streamed.run("resume", "last", "--steps", "6")
    assert (refused.code, refused.stdout) == (2, "")
    assert "the data have changed since run tiny-0001 was saved (dataset layout " in refused.error
    assert "--branch" in refused.error
    assert streamed.result()["steps"] == 4
    streamed.assert_nobody_left()


@pytest.mark.long
def test_a_branch_and_an_evaluation_may_read_other_data_and_put_back_the_run_goes_on(streamed: Workplace) -> None:
    branched = streamed.run("resume", "last", "--branch", "--steps", "6", "--json")
    assert branched.code == 0, branched.stderr
    assert (branched.document["run"], branched.document["from_step"]) == ("tiny-0002", 4)
    others = "the data are others than those that the checkpoint was trained on (dataset layout "
    assert others in streamed.log("worker-0")
    assert others in branched.stderr
    assert [others in event["message"] for event in streamed.events() if event["kind"] == "log"] == [True]
    evaluated = streamed.run("eval", "tiny-0001", "--json")
    assert evaluated.code == 0, evaluated.stderr

    (streamed.folder / "train").rename(streamed.folder / "other")
    (streamed.folder / "before").rename(streamed.folder / "train")
    resumed = streamed.run("resume", "tiny-0001", "--steps", "6", "--json")
    assert resumed.code == 0, resumed.stderr
    assert (resumed.document["from_step"], resumed.document["steps"]) == (4, 6)
