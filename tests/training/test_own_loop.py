"""A training loop of one's own comes to the bits of the same model as a task, on any number of workers."""

from pathlib import Path
from typing import Any

import pytest

from quorate.training.own_loop import own_loop_of
from training import own_loops as loops
from training.recorded import run

KEYS: dict[str, Any] = {"batch_size": 12, "epochs": 2, "evaluate": {"every": 3}, "checkpoint": {"every": 2}}


@pytest.mark.parametrize("keys", [{}, {"accumulate": 2, "clip_norm": 0.5}, {"strategy": "parameter-server"}], ids=str)
def test_it_comes_to_the_bits_of_the_same_model_as_a_task(keys: dict[str, Any], tmp_path: Path) -> None:
    as_task = run(loops.Noisy, tmp_path / "task", **KEYS | keys)
    main = own_loop_of(loops.noisy)
    for workers in (1, 2, 3):
        own = run(main, tmp_path / f"own-{workers}", workers, **KEYS | keys)
        assert own.ended.digest == as_task.ended.digest
        assert own.ended.progress == as_task.ended.progress
        assert own.told == as_task.told
