"""A step whose memory runs out is done again in smaller micro-batches, by all workers alike."""

import gc
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from quorate.core.errors import JobFileError
from quorate.core.generation import Cursor
from quorate.strategies.agreement import shortage_of
from quorate.task.progress import Progress
from quorate.training.lane import LaneResult
from quorate.training.strategy import Shortage
from training.shortage_tasks import Held, Scarce

pytestmark = pytest.mark.usefixtures("unmeasured")

FROM_STEP_3 = {"since": 0.5}


def train(folder: Path, workers: int = 1, **keys: Any) -> gang.Ended:
    folder.mkdir(exist_ok=True)
    stop_at, sabotage = keys.pop("stop_at", None), keys.pop("sabotage", None)
    given = {"batch_size": 24, "steps": 7, "on_out_of_memory": "shrink", "evaluate": {"every": 3}, "clip_norm": 0.5}
    task = keys.pop("task", Scarce)
    spec = gang.job(task, **given | keys)
    return gang.train(task, spec, workers, folder, stop_at=stop_at, sabotage=sabotage)


@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_bits_do_not_depend_on_who_runs_out(tmp_path: Path, in_backward: bool) -> None:
    params = {**FROM_STEP_3, "in_backward": in_backward}
    alone = train(tmp_path / "1", 1, params=params)
    assert alone.progress["micro_batches"] == [[3, 2]]
    on_two = train(tmp_path / "2", 2, params=params, links="tcp")
    on_four = train(tmp_path / "4", 4, params=params)
    assert {on_two.digest, on_four.digest} == {alone.digest}
    assert on_two.progress["micro_batches"] == on_four.progress["micro_batches"] == [[3, 2]]


def test_nothing_of_a_failed_try_reaches_the_weights(tmp_path: Path) -> None:
    shrunk = train(tmp_path / "shrunk", 2, params={"room": 3})
    assert shrunk.progress["micro_batches"] == [[1, 2]]
    said = train(tmp_path / "said", 2, params={"room": 3}, accumulate=2)
    assert said.progress["micro_batches"] == []
    assert shrunk.digest == said.digest


def test_a_lone_lane_and_compressed_gradients_shrink_too(tmp_path: Path) -> None:
    compressed = {"kind": "ring", "compress": {"top_k": 0.2}}
    kinds: dict[str, dict[str, Any]] = {"lone": {"lanes": 1}, "compressed": {"strategy": compressed}}
    for name, keys in kinds.items():
        shrunk = train(tmp_path / name, 1, params={"room": 3}, **keys)
        count = shrunk.progress["micro_batches"][-1][1]
        assert count > 1
        assert shrunk.digest == train(tmp_path / f"{name} said", 1, params={"room": 3}, accumulate=count, **keys).digest


def test_nothing_of_a_failed_try_keeps_its_memory(tmp_path: Path) -> None:
    def collect_nothing(_: int, __: Any) -> None:
        gc.disable()

    ended = train(tmp_path / "held", 1, task=Held, params={"room": 3}, lanes=1, sabotage=collect_nothing)
    assert not ended.failures
    assert ended.progress["micro_batches"][-1] == [1, 8]


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_lane_that_could_not_even_begin(tmp_path: Path) -> None:
    def run_out(position: int, loop: Any) -> None:
        begin, begun = loop.replica.begin_lane, count(1)

        def scarce() -> None:
            if position == 1 and next(begun) == 4:  # the last of its two lanes, at the second step
                raise torch.OutOfMemoryError("CUDA out of memory.")
            begin()

        loop.replica.begin_lane = scarce

    roomy = {"room": 100}
    ended = train(tmp_path / "begun", 2, params=roomy, sabotage=run_out, links="tcp")
    assert ended.progress["micro_batches"] == [[2, 2]]


def test_what_was_noted_of_steps_that_are_done_without_it_counts_for_nothing() -> None:
    at_five = Progress(Cursor(5), micro_batches=((2, 2),))
    assert at_five.knowing(((2, 2), (5, 4), (6, 8))).micro_batches == ((2, 2), (6, 8))
    assert at_five.knowing(((5, 4),)) is at_five


def test_loaders_read_by_the_new_number(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", 1, params=FROM_STEP_3)
    assert train(tmp_path / "loaders", 2, params=FROM_STEP_3, loader_workers=2).digest == plain.digest


def test_it_shrinks_until_it_fits(tmp_path: Path) -> None:
    ended = train(tmp_path / "all", 2, params={**FROM_STEP_3, "room": 1})
    assert ended.progress["micro_batches"] == [[3, 2], [3, 4], [3, 6]]
    assert not ended.failures


@pytest.mark.parametrize(
    "stop_at", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(5, marks=pytest.mark.long)]
)
def test_a_job_that_is_stopped_and_resumed_has_the_same_bits(tmp_path: Path, stop_at: int) -> None:
    whole = train(tmp_path / "whole", 1, params=FROM_STEP_3)
    train(tmp_path / "parts", 2, params=FROM_STEP_3, stop_at=stop_at)
    assert train(tmp_path / "parts", 4, params=FROM_STEP_3).digest == whole.digest


def test_one_who_knows_more_than_the_others_tells_them(tmp_path: Path) -> None:
    def know(position: int, loop: Any) -> None:
        if position == 1:
            loop.progress = replace(loop.progress, micro_batches=((1, 3),))
            loop.feed.begin_again(iter(()))

    roomy = {"room": 100}
    ended = train(tmp_path / "told", 2, params=roomy, sabotage=know)
    assert ended.progress["micro_batches"] == [[1, 3]]
    assert ended.digest == train(tmp_path / "said", 1, params=roomy, accumulate=3).digest


def test_one_sample_that_does_not_fit_ends_the_job(tmp_path: Path) -> None:
    told = train(tmp_path / "none", 2, params={"room": 0}).failure.message
    assert "Memory ran out in lane 0 at step 1 with one sample at a time" in told
    assert "a smaller batch_size (now 24)" in told
    assert "more lanes (now 4) on more workers" in told


def test_without_shrink_it_is_told_what_to_change(tmp_path: Path) -> None:
    failure = train(tmp_path / "fail", 1, on_out_of_memory="fail").failure
    assert failure.kind == "UserCodeError"
    assert "CUDA out of memory. Tried to allocate 6 GiB" in failure.message
    assert "Memory ran out with 6 samples at a time. To need less: a smaller batch_size (now 24)" in failure.message
    assert "`on_out_of_memory: shrink` raises accumulate by itself" in failure.message


def test_lanes_agree_on_the_largest_number() -> None:
    def lane(number: int, count: int, shortage: str = "") -> LaneResult:
        return LaneResult(number, 4, micro_batches=count, shortage=shortage)

    assert shortage_of([lane(0, 2), lane(1, 2)]) is None
    assert shortage_of([lane(0, 2), lane(1, 2, "none left")]) == Shortage(2, (1,), "none left")
    assert shortage_of([lane(0, 2), lane(1, 4)]) == Shortage(4)
    # It has run out with a number that the others know to be too small already.
    assert shortage_of([lane(0, 2, "none left"), lane(1, 4)]) == Shortage(4)


def test_servers_do_not_shrink() -> None:
    with pytest.raises(JobFileError, match="not possible with strategy: parameter-server"):
        gang.job(Scarce, strategy="parameter-server", on_out_of_memory="shrink")
