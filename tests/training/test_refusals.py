"""What cannot keep the promise is caught, and named, before it costs anybody a result."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import TaskError
from quorate.replica.replica import Replica, check_repeatable
from quorate.task.task import Task


class BuiltWithoutSeed(tasks.Regression):
    def model(self) -> nn.Module:
        model = super().model()
        unseeded = torch.Generator()
        unseeded.seed()
        nn.init.normal_(model.get_parameter("2.weight"), generator=unseeded)
        return model


class ClearsGradients(tasks.Regression):
    """zero_grad() where a hand-written loop with accumulation must not have it either."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.zero_grad()
        return super().loss(model, batch)


class ClearsOneGradient(tasks.Regression):
    """The gradient is detached, and no later backward pass touches its parameter."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"first": nn.Linear(tasks.FEATURES, 1), "second": nn.Linear(tasks.FEATURES, 1)})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        assert isinstance(model, nn.ModuleDict)
        weight = model["first"].get_parameter("weight")
        part = "first" if weight.grad is None else "second"
        weight.grad = None
        return F.mse_loss(model[part](inputs).squeeze(-1), targets)


class CallsBackward(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        loss.backward(retain_graph=True)
        return loss


class SparseGradients(tasks.IndexBackward):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"rows": nn.Embedding(8, 4, sparse=True), "out": nn.Linear(4, 1)})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        return model["out"](model["rows"](batch).sum(1)).square().mean()


class FreezesWhileTraining(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.get_parameter("0.bias").requires_grad_(False)
        return super().loss(model, batch)


class TeachesInLoss(tasks.Regression):
    """A mean teacher, moved where only lanes run."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            model.get_parameter("0.bias").mul_(0.99)
        return super().loss(model, batch)


class WritesThroughData(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.get_parameter("2.bias").data.add_(1e-3)
        return super().loss(model, batch)


class ChangedByMetrics(tasks.Regression):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        model.get_parameter("0.bias").add_(1.0)
        return super().metrics(model, batch)


class LimitsNorms(tasks.IndexBackward):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"rows": nn.Embedding(8, 4, max_norm=0.5), "out": nn.Linear(4, 1)})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        return model["out"](model["rows"](batch).sum(1)).square().mean()


class MovesItsTeacher(tasks.ConstantBuffers):
    """A mean teacher in a plain attribute, which the lanes begin to move at the fifth step."""

    def model(self) -> nn.Module:
        self.teacher = nn.Linear(tasks.FEATURES, 1)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and int(model.get_buffer("count")) >= 8:  # two a step
            self.teacher.weight.data.lerp_(model.get_parameter("linear.weight").data, 0.1)
        return super().loss(model, batch) + F.mse_loss(model(batch[0]), self.teacher(batch[0]).detach())


class RemembersTargets(tasks.Regression):
    """A memory of what earlier lanes have seen."""

    def __init__(self) -> None:
        self.memory = torch.zeros(3)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.memory.copy_(batch[1][:3])
        return super().loss(model, batch)


class CollectsPredictions(tasks.Regression):
    def __init__(self) -> None:
        self.errors: list[float] = []

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        self.errors.append(self.loss(model, batch).item())
        return {"error": sum(self.errors) / len(self.errors)}


class DrawsFromItsOwn(tasks.Regression):
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return super().loss(model, (inputs + torch.rand(inputs.shape, generator=self._generator), targets))


class DrawsFromNumpy(DrawsFromItsOwn):
    def __init__(self) -> None:
        self.random = numpy.random.default_rng(3)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return tasks.Regression.loss(self, model, batch) * self.random.random()


class TearsSharedBuffer(tasks.SharedBuffer):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.get_submodule("second").table = torch.ones(3)
        return super().loss(model, batch)


class MixesLosses(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return (loss, 3) if batch[1][0] > 0 else loss


class Lazy(tasks.Regression):
    def model(self) -> nn.Module:
        return nn.LazyLinear(1)


class WithoutValues(tasks.Regression):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(tasks.FEATURES, 2), nn.Linear(2, 1, device="meta"))


class BufferWithoutValues(tasks.Regression):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("scale", torch.ones(1, device="meta"))
        return model


class NothingToTrain(tasks.Regression):
    def model(self) -> nn.Module:
        return nn.Linear(tasks.FEATURES, 1).requires_grad_(False)


class Lbfgs(tasks.Regression):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.LBFGS(model.parameters())


class VectorLoss(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return (model(inputs).squeeze(-1) - targets).square()


class NumberLoss(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).item()


class DetachedLoss(tasks.Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).detach()


class OtherNames(tasks.TwoOptimizers):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses = super().loss(model, batch)
        return {"make": losses["make"], "jduge": losses["judge"]}


class NotFinite(tasks.Regression):
    """One sample of lane 2 at the third step is not a number."""

    def order(self, epoch: int, generator: torch.Generator) -> Any:
        return range(tasks.SAMPLES)

    def datasets(self) -> Any:
        points = tasks.Points()
        points.inputs[2 * 12 + 7] = float("nan")
        return points


@pytest.mark.parametrize(
    ("task", "keys", "kind", "words"),
    [
        (ClearsGradients, {"accumulate": 2}, "UnsupportedModelError", ["'0.weight'", "detached", "zero_grad()"]),
        (ClearsOneGradient, {"accumulate": 2}, "UnsupportedModelError", ["'first.weight'", "detached"]),
        (CallsBackward, {}, "UnsupportedModelError", ["backward()", "'0.weight'"]),
        (SparseGradients, {}, "UnsupportedModelError", ["'rows.weight'", "sparse"]),
        (FreezesWhileTraining, {}, "UnsupportedModelError", ["'0.bias'", "requires_grad"]),
        (tasks.UnruledBuffer, {}, "UnsupportedModelError", ["'table'", 'buffer_rules = {"table": "mean"}', "step 1"]),
        (TeachesInLoss, {}, "UnsupportedModelError", ["'0.bias'", "changed in loss()"]),
        (WritesThroughData, {}, "UnsupportedModelError", ["'2.bias'", "changed in loss()"]),
        (ChangedByMetrics, {}, "UnsupportedModelError", ["'0.bias'", "changed in metrics()"]),
        (LimitsNorms, {}, "UnsupportedModelError", ["'rows.weight'", "changed in loss()"]),
        (MovesItsTeacher, {}, "UnsupportedModelError", ["'self.teacher.weight' (a tensor)", "loss()", "`average`"]),
        (RemembersTargets, {}, "UnsupportedModelError", ["'self.memory' (a tensor)", "a buffer of the model"]),
        (
            CollectsPredictions,
            {},
            "UnsupportedModelError",
            ["'self.errors' (a list)", "metrics()", "workers"],
        ),
        (DrawsFromItsOwn, {}, "UnsupportedModelError", ["'self._generator'", "global generators"]),
        (DrawsFromNumpy, {}, "UnsupportedModelError", ["'self.random'", "global generators"]),
        (TearsSharedBuffer, {}, "UnsupportedModelError", ["'first.table'", "shared"]),
        (MixesLosses, {}, "LossError", ["(sum, count) for others"]),
        (Lazy, {}, "TaskError", ["'weight'", "lazy"]),
        (WithoutValues, {}, "TaskError", ["'1.weight' is on the meta device", "assign=True"]),
        (BufferWithoutValues, {}, "TaskError", ["'scale' is on the meta device"]),
        (NothingToTrain, {}, "TaskError", ["requires_grad"]),
        (Lbfgs, {}, "TaskError", ["LBFGS", "closure"]),
        (VectorLoss, {}, "LossError", ["(3,)", "one element", "loss.mean()"]),
        (NumberLoss, {}, "LossError", ["float", "tensor"]),
        (DetachedLoss, {}, "LossError", ["does not depend on the parameters"]),
        (OtherNames, {}, "LossError", ["'jduge'", "'judge'"]),
        (NotFinite, {}, "LossError", ["nan", "step 3", "lane 2"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
@pytest.mark.parametrize("workers", [1, 3])
def test_refused_by_name(
    task: type[Task], keys: dict[str, Any], kind: str, words: list[str], workers: int, tmp_path: Path
) -> None:
    failure = gang.train(task, gang.job(task, **keys), workers, tmp_path).failure
    assert failure.kind == kind
    for word in words:
        assert word in failure.message


@pytest.mark.parametrize("workers", [1, 2])
def test_a_teacher_is_refused_at_the_step_that_moves_it(workers: int, tmp_path: Path) -> None:
    assert gang.train(MovesItsTeacher, gang.job(MovesItsTeacher), workers, tmp_path).failure.step == 5


def test_a_model_built_without_a_seed_is_named() -> None:
    spec = gang.job(BuiltWithoutSeed)
    with pytest.raises(TaskError, match=r"model\(\) gives other weights each time .* first in '2.weight'"):
        check_repeatable(BuiltWithoutSeed(), spec, Replica(BuiltWithoutSeed(), spec))


def test_a_model_built_from_the_seed_is_repeatable() -> None:
    spec = gang.job(tasks.TinyTransformer)
    check_repeatable(tasks.TinyTransformer(), spec, Replica(tasks.TinyTransformer(), spec))


def _other_weights(position: int, loop: Any) -> None:
    if position == 1:
        with torch.no_grad():
            loop.replica.model.get_parameter("0.weight")[0, 0] += 1e-7


def _other_momentum(position: int, loop: Any) -> None:
    if position == 2:
        for optimizer in loop.replica.optimizers.by_name.values():
            optimizer.param_groups[0]["momentum"] = 0.91


@pytest.mark.parametrize(
    ("sabotage", "worker", "kind", "held"),
    [
        (_other_weights, 1, "ReplicasDiffer", "hold different bits, first in '0.weight'"),
        (_other_momentum, 2, "SettingsDiffer", "have 0.91 and 0.9 in optimizer.param_groups[0]['momentum']"),
    ],
)
def test_a_worker_with_other_bits_is_named(sabotage: Any, worker: int, kind: str, held: str, tmp_path: Path) -> None:
    spec = gang.job(tasks.Momentum, checkpoint={"every": 2})
    failure = gang.train(tasks.Momentum, spec, 3, tmp_path, sabotage=sabotage).failure
    assert (failure.kind, failure.culprits) == (kind, (worker,))
    rest = ", ".join(str(other) for other in range(3) if other != worker)
    assert f"worker {worker} and workers {rest} {held}" in failure.message
    assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").iterdir())


def test_what_the_task_gives_instead_of_a_model_is_named() -> None:
    class NotAModel(tasks.Regression):
        def model(self) -> Any:
            return {"weights": 1}

    with pytest.raises(TaskError, match=r"model\(\) returned a dict"):
        Replica(NotAModel(), gang.job(tasks.Regression))


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(tmp_path: Path) -> None:
    """The step ends before any weight has changed: the last checkpoint is what the job goes on from."""
    spec = gang.job(NotFinite, checkpoint={"every": 1})
    gang.train(NotFinite, spec, 2, tmp_path)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-00000001", "step-00000002"]


class CountingPoints(tasks.Points):
    """Every visit changes the sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        inputs += 0.1
        return inputs, target


class DrawingPoints(tasks.Points):
    def __init__(self) -> None:
        super().__init__()
        self.random = numpy.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs * float(self.random.random()), target


class ChangesItsSamples(tasks.Regression):
    def datasets(self) -> Any:
        return CountingPoints()


class DrawsForSamples(tasks.Regression):
    def datasets(self) -> Any:
        return DrawingPoints()


@pytest.mark.parametrize("task", [ChangesItsSamples, DrawsForSamples])
def test_a_sample_that_differs_each_time_it_is_read_is_named(task: type[Task], tmp_path: Path) -> None:
    failure = gang.train(task, gang.job(task), 2, tmp_path).failure
    assert (failure.kind, failure.exit_code) == ("TaskError", 2)
    assert "Sample 0 of the training set is another one each time it is read" in failure.message


def test_a_model_on_the_meta_device_is_refused_by_a_gang_that_defers_it(tmp_path: Path) -> None:
    spec = gang.job(WithoutValues, strategy={"kind": "fsdp", "shard": 2}, workers=2)
    assert "'1.weight' is on the meta device" in gang.train(WithoutValues, spec, 2, tmp_path).failure.message
