"""A lane's work is warmed up, captured and replayed; what a graph would not repeat is found first, and told."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gang
from gpu.recording_capture import RecordingCapture
from plain_gradients import plain_gradients
from quorate.cuda.captured_program import MOST_GRAPHS, LaneGraphs
from quorate.replica.gradients import LoneGradients
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.task.task import Task
from quorate.training.lane import LaneResult, LaneRunner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.dropout(self.norm(inputs)))
        return out


class Plain(Task):
    calls = 0
    also: Any = None

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        type(self).calls += 1
        loss = model(batch["x"]).square().mean()
        self.log("twice", loss * 2)
        return loss if type(self).also is None else type(self).also(self, model, batch, loss)


class Worker:
    """A replica, its graphs, and a runner of each generation."""

    def __init__(self, also: Any = None, lanes: int = 2, *, captures: bool = True) -> None:
        made = type("Made", (Plain,), {"also": None if also is None else staticmethod(also), "calls": 0})
        self.task = made()
        self.replica = Replica(self.task, gang.job(Plain))
        self.capture = RecordingCapture()
        self.watch = StateWatch(self.task, self.replica)
        self.graphs = LaneGraphs(self.task, self.replica, self.capture) if captures else None
        self._lanes = lanes
        self.begin_generation()

    def begin_generation(self) -> None:
        trainable = self.replica.trainable
        self.gradients: Any = (
            LoneGradients(trainable) if self._lanes == 1 else plain_gradients(trainable, range(self._lanes), 25.0)
        )
        self.runner = LaneRunner(self.task, self.replica, self.gradients, self.watch, 1, self.graphs)

    def run(self, step: int, *batches: tuple[int, Any], lane: int = 0, batch_samples: int = 8) -> list[Any]:
        """All that a lane gives, for comparison."""
        result: LaneResult = self.runner.run(step, lane, batches, batch_samples)
        gradients = [
            None if parameter.grad is None else parameter.grad.clone() for parameter in self.gradients.parameters
        ]
        return [result.losses, result.log, result.present, result.buffers, gradients]

    @property
    def told(self) -> str:
        assert self.graphs is not None
        return "; ".join(self.graphs.take_notes())


def batch(number: int, samples: int = 4, **more: Any) -> tuple[int, Any]:
    return samples, {"x": torch.randn(samples, 3, generator=torch.Generator().manual_seed(number)), **more}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_replayed_lane_gives_what_its_python_would(lanes: int) -> None:
    captured, eager = Worker(lanes=lanes), Worker(lanes=lanes, captures=False)
    for step in range(1, 9):
        content = [batch(3 * step + part) for part in range(step % 3 + 1)]
        size = 4 * len(content) + step  # the weight changes too
        assert same(captured.run(step, *content, batch_samples=size), eager.run(step, *content, batch_samples=size))
    assert captured.capture.records == 1
    assert captured.capture.replays > 8
    assert type(captured.task).calls < type(eager.task).calls
    assert captured.told == ""


def test_another_generation_replays_the_graphs_of_the_one_before() -> None:
    worker, eager = Worker(), Worker(captures=False)
    for step in range(1, 5):
        worker.run(step, batch(step))
    assert (worker.capture.records, worker.capture.replays) == (1, 1)
    worker.begin_generation()
    assert same(worker.run(5, batch(5), lane=1), eager.run(5, batch(5), lane=1))
    assert (worker.capture.records, worker.capture.replays, worker.capture.warm_ups) == (1, 2, 3)


def test_nothing_is_captured_in_the_lane_of_its_warm_up() -> None:
    """What user code has assigned is known at the end of it."""
    worker = Worker()
    worker.run(1, *(batch(number) for number in range(6)))
    assert worker.capture.records == 0
    worker.run(2, batch(7))
    assert worker.capture.records == 1


def assigns(task: Any, model: nn.Module, batch: Any, loss: torch.Tensor) -> Any:
    task.seen = True
    return loss


def assigns_buffer(task: Any, model: Any, batch: Any, loss: torch.Tensor) -> Any:
    model.norm.running_mean = model.norm.running_mean * 0.5
    return loss


def evaluates(task: Any, model: Any, batch: Any, loss: torch.Tensor) -> Any:
    model.dropout.eval()
    return loss


def logs(task: Any, model: Any, batch: Any, loss: torch.Tensor) -> Any:
    task.log("calls", type(task).calls)
    return loss


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "reads": (lambda task, model, batch, loss: loss if loss.item() > 0 else loss * 2, "waits for the device"),
    "draws": (lambda task, model, batch, loss: loss * random.random(), "draws random numbers on the host"),
    "assigns": (assigns, "'self.seen' is assigned while a lane runs"),
    "assigns a buffer": (assigns_buffer, "a buffer is assigned"),
    "changes a mode": (evaluates, "another mode"),
    "logs": (logs, "numbers of the host that change"),
    "counts": (lambda task, model, batch, loss: (loss, type(task).calls), "numbers of the host that change"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_graph_would_not_repeat_is_found_and_told_once(kind: str) -> None:
    also, words = REFUSED[kind]
    worker, eager = Worker(also), Worker(also, captures=False)
    told = []
    for step in range(1, 7):
        assert same(worker.run(step, batch(step)), eager.run(step, batch(step)))
        told.append(worker.told)
    assert worker.capture.replays == 0
    assert words in "".join(told)
    assert sum(map(bool, told)) == 1


def test_a_number_of_the_host_that_stays_the_same_is_captured_as_it_is() -> None:
    def also(task: Any, model: Any, batch: Any, loss: torch.Tensor) -> Any:
        task.log("size", len(batch["x"]))
        return loss, torch.tensor(3) + len(batch["x"])

    worker, eager = Worker(also), Worker(also, captures=False)
    for step in range(1, 6):
        assert same(worker.run(step, batch(step)), eager.run(step, batch(step)))
    assert worker.capture.replays == 2


def test_a_model_with_hooks_of_its_own_is_not_captured() -> None:
    worker = Worker()
    handle = worker.replica.model.register_forward_hook(lambda *_: None)
    graphs = LaneGraphs(worker.task, worker.replica, worker.capture)
    assert "hook of its own" in "".join(graphs.take_notes())
    handle.remove()


def test_blocks_that_are_computed_again_are_captured_if_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    worker.replica.spec = gang.job(Plain, memory={"checkpoint_activations": "linear"})
    told = LaneGraphs(worker.task, worker.replica, worker.capture).take_notes()
    assert "state of the random generator" in "".join(told)
    monkeypatch.setattr(worker.replica.device, "compiles", True, raising=False)
    assert LaneGraphs(worker.task, worker.replica, worker.capture).take_notes() == []


def test_a_recording_that_fails_leaves_the_path_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, eager = Worker(), Worker(captures=False)

    def record(work: Any) -> Any:
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")
        except RuntimeError:
            raise RuntimeError("CUDA error: a previous error during capture") from None

    monkeypatch.setattr(worker.capture, "record", record)
    told = ""
    for step in range(1, 7):
        assert same(worker.run(step, batch(step)), eager.run(step, batch(step)))
        told += worker.told
    assert "operation not permitted when stream is capturing" in told
    assert "and more" not in told


def test_only_a_few_shapes_are_captured() -> None:
    worker, eager = Worker(), Worker(captures=False)
    told = []
    for step in range(1, 6):
        content = [batch(step, samples) for samples in range(2, 4 + MOST_GRAPHS)]
        assert same(worker.run(step, *content), eager.run(step, *content))
        told.append(worker.told)
    assert worker.capture.records == MOST_GRAPHS
    assert [bool(note) for note in told] == [True, False, False, False, False]


def test_a_batch_with_what_cannot_be_compared_is_not_captured() -> None:
    worker = Worker()
    for step in range(1, 6):
        worker.run(step, batch(step, more=object()))
    assert worker.capture.warm_ups == 0
    assert "neither a tensor nor a plain value" in worker.told


def test_a_buffer_that_lies_elsewhere_has_its_lanes_captured_again() -> None:
    worker = Worker()
    for step in range(1, 6):
        worker.run(step, batch(step))
    assert worker.capture.records == 1
    norm, buffer = worker.replica.model.get_submodule("norm"), worker.replica.buffers._buffers["norm.running_mean"]
    norm._buffers["running_mean"] = buffer.home = torch.zeros(3)
    worker.run(6, batch(6))
    assert worker.capture.replays == 2
    assert worker.capture.warm_ups == 4
