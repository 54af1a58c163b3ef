"""A training loop of one's own comes to the bits of the same model as a task, on any number of workers."""

from pathlib import Path
from typing import Any

import pytest

from own_loop import own_loops as loops
from quorate.own_loop.loop import own_loop_of
from training.recorded import run

KEYS: dict[str, Any] = {"batch_size": 12, "epochs": 2, "evaluate": {"every": 3}, "checkpoint": {"every": 2}}


@pytest.mark.parametrize(
    "keys",
    [pytest.param({}, marks=pytest.mark.long), {"accumulate": 2, "clip_norm": 0.5}, {"strategy": "parameter-server"}],
    ids=str,
)
def test_it_comes_to_the_bits_of_the_same_model_as_a_task(keys: dict[str, Any], tmp_path: Path) -> None:
    as_task = run(loops.Noisy, tmp_path / "task", **KEYS | keys)
    main = own_loop_of(loops.noisy)
    for workers in (1, 3):
        own = run(main, tmp_path / f"own-{workers}", workers, **KEYS | keys)
        assert own.ended.digest == as_task.ended.digest
        assert own.ended.progress | {"kept": ""} == as_task.ended.progress
        assert own.told == as_task.told


@pytest.mark.long
@pytest.mark.parametrize("stop_at", [3, 4], ids=["within an epoch", "at its end"])
def test_it_is_resumed_on_another_number_of_workers(stop_at: int, tmp_path: Path) -> None:
    keys = {"batch_size": 12, "epochs": 2}
    for main in (own_loop_of(loops.clipped), own_loop_of(loops.noisy)):
        whole = run(main, tmp_path / f"{main.__name__}-whole", **keys)
        folder = tmp_path / f"{main.__name__}-parts"
        assert run(main, folder, 2, stop_at=stop_at, **keys).ended.ending == "interrupted"
        resumed = run(main, folder, 3, **keys)
        assert resumed.ended.digest == whole.ended.digest
        assert resumed.ended.progress == whole.ended.progress


def test_it_clips_as_the_job_does(tmp_path: Path) -> None:
    by_job = run(own_loop_of(loops.unclipped), tmp_path / "job", clip_norm=0.5)
    by_itself = run(own_loop_of(loops.clipped), tmp_path / "own", 2)
    freely = run(own_loop_of(loops.unclipped), tmp_path / "free")
    assert by_itself.ended.digest == by_job.ended.digest != freely.ended.digest
