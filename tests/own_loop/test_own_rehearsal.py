"""What a rehearsal of a joining worker needs, and what it leaves as it was."""

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from own_loop import own_loops as loops
from quorate.core.errors import LanesDiffer, UnsupportedModelError
from quorate.own_loop import rehearsal as own_rehearsal
from quorate.own_loop.loop import own_loop_of
from quorate.own_loop.state import numbers_of, same_numbers
from quorate.task.imported_anew import imported_anew, swapped_modules
from quorate.training.loop import Loop
from training.recorded import run

KEYS: dict[str, Any] = {"batch_size": 12, "steps": 4}


def test_memory_that_does_not_suffice_for_a_rehearsal_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(own_loop_of(loops.clipped), tmp_path / "whole", **KEYS).ended
    begun = tmp_path / "begun"

    def short(*_: Any) -> None:
        with begun.open("a") as file:
            file.write("once ")
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(own_rehearsal, "Replica", short)
    ended = run(own_loop_of(loops.clipped), tmp_path / "short", **KEYS).ended
    assert begun.read_text() == "once "
    assert ended.digest == whole.digest


def test_a_worker_that_computes_wrongly_is_not_told_as_a_mistake_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit names parts that differ, buffers among them, as does the message on a loop that changes them."""
    step = Loop._step
    found = LanesDiffer("Lane 1 was computed several times (buffer '2.running_mean' differs); worker 0 is wrong", [0])

    def differ(self: Loop, number: int) -> Any:
        step(self, number)
        raise found

    monkeypatch.setattr(Loop, "_step", differ)
    failure = run(own_loop_of(loops.noisy), tmp_path, **KEYS).ended.failure
    assert (failure.kind, failure.message) == ("LanesDiffer", str(found))


@pytest.fixture
def importing() -> Iterator[None]:
    """A thread that imports as long as the test takes."""
    is_over = threading.Event()

    def add() -> None:
        for number in range(10**7):
            sys.modules[f"made_{number % 5000}"] = ModuleType("made")
            sys.modules.pop(f"made_{(number + 2500) % 5000}", None)
            if is_over.is_set():
                return

    thread = threading.Thread(target=add)
    thread.start()
    yield
    is_over.set()
    thread.join()
    for name in [name for name in sys.modules if name.startswith("made_")]:
        del sys.modules[name]


def test_modules_are_swapped_while_others_are_imported(importing: None) -> None:
    for _ in range(50):
        with swapped_modules({"of_a_rehearsal": ModuleType("of_a_rehearsal")}, without=("no_such",)):
            assert "of_a_rehearsal" in sys.modules
    assert "of_a_rehearsal" not in sys.modules


def test_a_gradient_that_is_there_one_time_only_is_a_difference() -> None:
    scale = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(2, requires_grad=True)
    with_scale, without = (numbers_of(loss, [scale, weight]) for loss in (weight.sum() * scale, weight.sum() * 1))
    assert not same_numbers(with_scale, without)
    assert not same_numbers(with_scale, with_scale[:1])
    assert same_numbers(with_scale, with_scale)


def test_a_module_that_can_be_imported_only_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps in globals could not be looked at."""
    (tmp_path / "made_only_once.py").write_text(
        "import sys\nassert not hasattr(sys, 'made_only_once'), 'once'\nsys.made_only_once = True\ndef main(run): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("made_only_once")
    with pytest.raises(UnsupportedModelError, match=r"cannot import made_only_once once more.*once"):
        imported_anew(module.main, 0)
    del sys.made_only_once  # type: ignore[attr-defined]
