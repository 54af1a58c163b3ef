"""A replica's state goes through a checkpoint and comes back to the bit, and only into the model it came from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from checkpoint.whole_save import save_whole
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import RunError, TaskError, UnsupportedModelError, UserCodeError
from quorate.replica.device import digests
from quorate.replica.replica import Replica, check_repeatable
from quorate.task.task import Task


class Rich(nn.Module):
    """Tied weights, a bfloat16 parameter, a frozen one, and buffers of every kind."""

    counter: torch.Tensor
    window: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("window", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)


class RichTask(Task):
    def model(self) -> nn.Module:
        return Rich()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)


SPEC = gang.job(RichTask)


def replica(task_type: type[Task] = RichTask) -> Replica:
    return Replica(task_type(), SPEC)


def trained() -> Replica:
    built = replica()
    for number in range(3):
        for _, parameter in built.trainable:
            parameter.grad = torch.full_like(parameter, 0.1 + number)
        built.optimizers.update()
    built.buffers.commit(
        {
            "counter": torch.tensor(2**40),
            "window": torch.arange(7.0),
            "hidden": torch.tensor([-0.0, torch.inf]),
            "norm.running_mean": torch.tensor([1.0, 2.0, 3.0]),
        }
    )
    return built


def round_trip(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    checkpoints = CheckpointFolder(folder)
    save_whole(checkpoints, state, step=1)
    newest = checkpoints.search().newest
    assert newest is not None
    return checkpoints.load(newest).state


def state_digests(built: Replica) -> dict[str, str]:
    return digests(built.state_tensors().items())


def test_a_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    first, second = trained(), replica()
    assert state_digests(second) != state_digests(first)
    second.load(round_trip(first.state(), tmp_path))
    assert state_digests(second) == state_digests(first)
    assert second.weights_digest() == first.weights_digest()
    assert isinstance(second.model, Rich)
    assert second.model.window.tolist() == list(range(7))
    assert torch.signbit(second.model.hidden[0])
    assert second.model.scale.dtype is torch.bfloat16
    assert second.model.out.weight is second.model.embed.weight


def test_a_loaded_replica_trains_on_as_the_first_does(tmp_path: Path) -> None:
    first, second = trained(), replica()
    second.load(round_trip(first.state(), tmp_path))
    for built in (first, second):
        for _, parameter in built.trainable:
            parameter.grad = torch.full_like(parameter, 0.3)
        built.optimizers.update()
    assert state_digests(second) == state_digests(first)


def test_digests_cover_parameters_buffers_and_optimizer() -> None:
    named = state_digests(trained())
    assert {"embed.weight", "scale", "frozen", "hidden", "norm.running_var"} <= set(named)
    assert "out.weight" not in named, "tied weights count once"
    assert any(name.startswith("optimizer") and "exp_avg" in name for name in named)


def test_building_is_a_fact_of_the_seed() -> None:
    assert replica().weights_digest() == replica().weights_digest()
    other = Replica(RichTask(), gang.job(RichTask, seed=12))
    assert other.weights_digest() != replica().weights_digest()
    assert replica().layout() == other.layout()
    assert "scale torch.bfloat16 (3,)" in other.layout()


class Wider(RichTask):
    def model(self) -> nn.Module:
        built = Rich()
        built.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        return built


class Renamed(RichTask):
    def model(self) -> nn.Module:
        built = Rich()
        built.another = nn.Parameter(torch.rand(1))
        return built


class OtherNorm(RichTask):
    def model(self) -> nn.Module:
        built = Rich()
        built.norm = nn.BatchNorm1d(3, affine=False)
        return built


class OtherStatistics(RichTask):
    def model(self) -> nn.Module:
        built = Rich()
        built.norm.running_var = torch.ones(4)
        return built


class FewerBuffers(RichTask):
    def model(self) -> nn.Module:
        built = Rich()
        del built.window
        return built


@pytest.mark.parametrize(
    ("task_type", "name"),
    [
        (Wider, r"'frozen' has shape \(2,\) there, and has shape \(3,\) in the model"),
        (Renamed, r"'another' does not exist there, and has shape \(1,\) in"),
        (OtherNorm, "'norm.bias'"),
        (OtherStatistics, "'norm.running_var'"),
        (FewerBuffers, r"'window' has shape \(7,\) there, and does not exist in"),
    ],
)
def test_another_models_checkpoint_is_refused_by_name(task_type: type[Task], name: str) -> None:
    built = replica(task_type)
    before = built.weights_digest()
    with pytest.raises(RunError, match=f"saved by another model: {name}"):
        built.load(trained().state())
    assert built.weights_digest() == before, "a refused checkpoint leaves nothing behind"


def test_freezing_or_thawing_while_training_is_refused() -> None:
    built = replica()
    built.check_trainable()
    assert isinstance(built.model, Rich)
    built.model.frozen.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match="requires_grad of 'frozen' was changed to True"):
        built.check_trainable()


class Small(Task):
    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)


class Preset(Small):
    def initial_weights(self) -> Mapping[str, torch.Tensor]:
        return {"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([5.0])}


class WrongPreset(Small):
    def initial_weights(self) -> Mapping[str, torch.Tensor]:
        return {"weight": torch.ones(1, 3)}


class NoModel(Small):
    def model(self) -> nn.Module:
        return "a model"  # type: ignore[return-value]


class Frozen(Small):
    def model(self) -> nn.Module:
        return nn.Linear(2, 1).requires_grad_(False)


class Unparametrized(Small):
    def model(self) -> nn.Module:
        return nn.Tanh()


class Forgetful(Small):
    def model(self) -> nn.Module:
        return None  # type: ignore[return-value]


class Lazy(Small):
    def model(self) -> nn.Module:
        return nn.LazyLinear(2)


def test_initial_weights_replace_what_model_built() -> None:
    assert replica(Preset).model.state_dict()["weight"].tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("task_type", "error", "text"),
    [
        (WrongPreset, UserCodeError, r"in initial_weights\(\)"),
        (NoModel, TaskError, r'model\(\) returned the text "a model"; it must return a torch.nn.Module'),
        (Frozen, TaskError, r"a Linear with nothing to train: none of its 2 parameters has requires_grad"),
        (Unparametrized, TaskError, "an? Tanh with nothing to train: it has no parameters at all"),
        (Forgetful, TaskError, r"model\(\) returned nothing \(None\).*Is a `return` missing"),
        (Task, UserCodeError, r"NotImplementedError.*in model\(\)"),
    ],
)
def test_what_model_and_initial_weights_may_not_give(task_type: type[Task], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        replica(task_type)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(TaskError, match="'weight' is a lazy parameter"):
        replica(Lazy)


class Unrepeatable(Small):
    built = 0

    def model(self) -> nn.Module:
        type(self).built += 1
        model = nn.Linear(2, 1)
        nn.init.constant_(model.bias, type(self).built)
        return model


def test_a_model_that_differs_each_time_is_found_by_name() -> None:
    check_repeatable(Small(), SPEC, replica(Small))
    with pytest.raises(TaskError, match=r"model\(\) gives other weights.*first in 'bias'"):
        check_repeatable(Unrepeatable(), SPEC, replica(Unrepeatable))
