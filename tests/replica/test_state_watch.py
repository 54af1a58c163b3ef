"""What user code leaves behind in plain attributes: put back, or refused by name."""

import itertools
import math
import random
import sys
import timeit
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import UnsupportedModelError
from quorate.replica.kept_values import COMPARED_ELEMENTS, MOST_ELEMENTS, PIECE, Change, KeptValues, is_users_own
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.task.task import Task
from quorate.training.told_once import news_of_names, of_names

Act = Callable[[Any, nn.Module], object]


class Meter:
    def __init__(self) -> None:
        self.total, self.parts = 0.0, [1.0]


class Keeps(tasks.Regression):
    """Something of every kind."""

    shared: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.flag, self.limit, self._hidden = False, math.nan, 0.0
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"a": 1}
        self.nested = {"deep": [[1], (2, [3])]}
        self.seen = {1}
        self.recent = deque([1], maxlen=3)
        self.counts = Counter(a=1)
        self.array = numpy.arange(4.0)
        self.weights = torch.ones(3)
        self.random = random.Random(3)
        self.numbers, self.walk = itertools.count(), enumerate([3, 4, 5])
        self.squares = (number**2 for number in itertools.count())
        self.torch_random = torch.Generator()
        self.meter = Meter()
        self.teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.teacher[1].register_buffer("num_batches_tracked", None)  # the only trace that batch norm leaves
        self.others = [nn.Linear(2, 2)]
        self.long = list(range(10_000, 10_000 + 5 * MOST_ELEMENTS))
        self.large = torch.zeros(3 * PIECE, dtype=torch.uint8)


class Watched:
    """A task under watch, and lanes that do as they are told."""

    def __init__(self, task: Task | None = None) -> None:
        self.task: Any = Keeps() if task is None else task
        self.replica = Replica(self.task, gang.job(tasks.Regression))
        self.watch = StateWatch(self.task, self.replica)

    @property
    def model(self) -> nn.Module:
        return self.replica.model

    def lane(self, act: Act) -> list[str]:
        put_back = self.watch.before_lane()
        act(self.task, self.model)
        put_back += self.watch.after_lane()
        self.watch.after_lanes()
        return put_back


def _set(**values: Any) -> Act:
    def act(task: Any, _: nn.Module) -> None:
        for name, value in values.items():
            setattr(task, name, value)

    return act


@pytest.mark.parametrize("before", [0, 1, 7])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (_set(flag=True), "self.flag"),
        (_set(flag=0), "self.flag"),
        (_set(_hidden=-0.0), "self._hidden"),
        (_set(new=1), "self.new"),
        (_set(history=[]), "self.history"),
        (_set(teacher=None), "self.teacher"),
        (lambda task, _: delattr(task, "table"), "self.table"),
        (lambda task, _: task.__dict__.update(late=3), "self.late"),
        (lambda _, model: setattr(model[0], "in_features", 7), "0.in_features"),
        (lambda _, model: setattr(model, "aux_loss", model[0].weight.sum()), "model.aux_loss"),
        (lambda _, model: model[1].register_forward_hook(print), "the hooks of 1"),
        (lambda task, _: setattr(task.teacher[0], "calls", 1), "self.teacher.0.calls"),
        (lambda task, _: task.table.update(b=2), "self.table"),
        (lambda task, _: setattr(task.meter, "late", 2), "self.meter"),
        (lambda task, model: task.history.append(model[0].weight.sum()), "self.history"),
    ],
)
def test_what_a_lane_assigns_is_put_back_and_named(act: Act, name: str, before: int) -> None:
    watched = Watched()
    kept, tables = dict(vars(watched.task)), dict(watched.task.table)
    for _ in range(before):
        assert watched.lane(lambda *_: None) == []
    assert watched.lane(act) == [name]
    assert all(vars(watched.task)[key] is value for key, value in kept.items() if key != "_log")
    assert vars(watched.task).keys() - {"_log"} == kept.keys() - {"_log"}
    assert (watched.task.table, watched.task.history) == (tables, [])
    assert not watched.model.get_submodule("1")._forward_hooks
    assert watched.lane(lambda *_: None) == []


def _bind(task: Any) -> None:
    task.weights.data = torch.zeros(3)


@pytest.mark.parametrize("before", [0, 6])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda task, _: task.history.append(1), "self.history"),
        (lambda task, _: task.history.append(torch.ones(1)), "self.history"),
        (lambda task, _: task.shared.append(1), "Keeps.shared"),
        (lambda task, _: task.table.update(a=2), "self.table"),
        (lambda task, _: task.nested["deep"][0].append(2), "self.nested['deep'][0]"),
        (lambda task, _: task.nested["deep"][1][1].clear(), "self.nested['deep'][1][1]"),
        (lambda task, _: task.seen.add(2), "self.seen"),
        (lambda task, _: task.recent.append(2), "self.recent"),
        (lambda task, _: task.counts.update("b"), "self.counts"),
        (lambda task, _: task.array.__setitem__(0, 3.0), "self.array"),
        (lambda task, _: task.weights.mul_(0.9), "self.weights"),
        (lambda task, _: task.weights.data.mul_(0.9), "self.weights"),
        (lambda task, _: _bind(task), "self.weights"),
        (lambda task, _: task.random.random(), "self.random"),
        (lambda task, _: next(task.numbers), "self.numbers"),
        (lambda task, _: next(task.walk), "self.walk"),
        (lambda task, _: next(task.squares), "self.squares"),
        (lambda task, _: torch.rand(1, generator=task.torch_random), "self.torch_random"),
        (lambda task, _: setattr(task.meter, "total", 1.0), "self.meter"),
        (lambda task, _: task.meter.parts.append(1.0), "self.meter.parts"),
        (lambda task, _: task.teacher[0].weight.data.mul_(0.9), "self.teacher.0.weight"),
        (lambda task, _: task.teacher(torch.randn(3, 2)), "self.teacher.1.running_mean"),
        (lambda task, _: nn.init.zeros_(task.others[0].bias), "self.others[0].bias"),
        (lambda task, _: task.long.append(1), "self.long"),
        (lambda _, model: setattr(model[0], "bias", nn.Parameter(torch.ones(9))), "0.bias"),
        (lambda _, model: setattr(model, "late", nn.Linear(2, 2)), "model.late"),
        (lambda _, model: model.register_buffer("late", torch.ones(1)), "model.late"),
    ],
)
def test_a_mutable_value_that_a_lane_changes_is_refused_by_name(act: Act, name: str, before: int) -> None:
    """Whenever it happens: also after lanes that changed nothing."""
    watched = Watched()
    for _ in range(before):
        watched.lane(lambda *_: None)
    with pytest.raises(UnsupportedModelError) as refused:
        for _ in range(4):
            watched.lane(act)
    assert f"'{name}'" in str(refused.value)
    assert "loss()" in str(refused.value)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda task: task.long.__setitem__(3 * MOST_ELEMENTS, 0), "self.long"),
        (lambda task: task.large.data[PIECE + 7 :].fill_(1), "self.large"),
    ],
)
def test_a_large_value_is_compared_in_turns_and_wholly_before_a_save(act: Any, name: str) -> None:
    in_turn, at_once = Watched(), Watched()
    act(at_once.task)
    with pytest.raises(UnsupportedModelError, match=name):
        at_once.watch.check("loss()", whole=True)
    act(in_turn.task)
    with pytest.raises(UnsupportedModelError, match=name):
        for _ in range(10):
            in_turn.lane(lambda *_: None)


def test_a_parameter_written_through_data_is_refused_late_in_the_run_too() -> None:
    watched = Watched()
    for _ in range(5):
        watched.lane(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"Parameter '2.bias' was changed in loss\(\)"):
        for _ in range(len(watched.replica.parameters)):
            watched.lane(lambda _, model: model.get_parameter("2.bias").data.add_(1.0))


def test_what_the_model_holds_and_what_samples_come_from_is_left_alone() -> None:
    class Holds(tasks.Regression):
        def datasets(self) -> Any:
            self.points = tasks.Points()
            return self.points

        def model(self) -> nn.Module:
            self.net = nn.Sequential(nn.Linear(tasks.FEATURES, 2), nn.BatchNorm1d(2))
            self.flat = self.net[0].weight.data
            return self.net

        def optimizer(self, model: nn.Module) -> Any:
            self.optimizer_ = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer_

    task = Holds()
    task.datasets()
    watched = Watched(task)
    watched.lane(lambda task, model: (model(torch.ones(3, tasks.FEATURES)), task.points.inputs.add_(1.0)))
    with torch.no_grad():
        task.net.get_parameter("0.weight").add_(1.0)
    task.optimizer_.param_groups[0]["lr"] = 0.2
    watched.watch.check("loss()", whole=True)


def _traced(layer: nn.Module) -> Any:
    return torch.jit.trace(layer, torch.ones(2, tasks.FEATURES))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("compile_", [torch.jit.script, _traced])
@pytest.mark.filterwarnings("ignore")  # torch warns of TorchScript itself
def test_a_module_of_torchscript_is_watched_like_any_other(compile_: Any) -> None:
    def compiled(*, train: bool) -> Any:
        return compile_(nn.Sequential(nn.Linear(tasks.FEATURES, 3), nn.BatchNorm1d(3)).train(train))

    class Scripted(tasks.Regression):
        def __init__(self) -> None:
            self.teacher = compiled(train=False)

        def model(self) -> nn.Module:
            model: nn.Module = compiled(train=True)
            return model

    watched = Watched(Scripted())
    inputs = torch.ones(2, tasks.FEATURES)
    assert watched.lane(lambda task, model: (task.teacher(inputs), model(inputs))) == []
    watched.watch.check("loss()", whole=True)
    with pytest.raises(UnsupportedModelError, match=r"self.teacher.*0\.bias"):
        watched.lane(lambda task, _: nn.init.ones_(dict(task.teacher.named_parameters())["0.bias"]))


def test_what_collate_assigns_does_not_reach_the_lane() -> None:
    class Collates(tasks.Regression):
        batches: int = 0

        def collate(self, samples: Any) -> Any:
            self.batches += 1
            return super().collate(samples)

    watched = Watched(Collates())
    watched.task.collate([(torch.ones(2), torch.ones(1))])
    seen: list[int] = []
    assert watched.lane(lambda task, _: seen.append(task.batches)) == ["self.batches"]
    assert seen == [0]


class OwnLstm(nn.LSTM):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._lengths: list[int] = []


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_of_a_subclass_of_a_layer_what_torch_keeps_is_left_out_and_what_the_user_keeps_is_not() -> None:
    class Recurrent(tasks.Regression):
        def model(self) -> nn.Module:
            return torch.nn.utils.weight_norm(OwnLstm(tasks.FEATURES, 3), "weight_hh_l0")

    watched = Watched(Recurrent())
    inputs = torch.ones(2, tasks.FEATURES)
    assert watched.lane(lambda _, model: model(inputs)) == []
    with pytest.raises(UnsupportedModelError, match="_lengths"):
        watched.lane(lambda _, model: vars(model)["_lengths"].append(2))


class _Odd(tasks.Regression):
    """Tensors that have no bytes to look at, outside the model."""

    def __init__(self) -> None:
        self.lazy = nn.LazyLinear(2)
        self.conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
        self.negative = self.conjugate.imag
        self.spread = torch.ones(4, 4)[:, 0]
        self.sparse = torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda task, _: task.lazy(torch.ones(2, 3)), "self.lazy.weight' (a lazy parameter)"),
        (lambda task, _: task.conjugate.mul_(2), "self.conjugate"),
        (lambda task, _: task.negative.mul_(2), "self.conjugate"),
        (lambda task, _: task.spread.mul_(2), "self.spread"),
    ],
)
def test_a_tensor_without_bytes_to_look_at_is_watched_by_its_version(act: Act, name: str) -> None:
    watched = Watched(_Odd())
    assert watched.lane(lambda *_: None) == []
    with pytest.raises(UnsupportedModelError) as refused:
        watched.lane(act)
    assert name in str(refused.value)


def test_of_many_elements_so_many_are_compared_at_each_step_and_all_of_them_in_turn() -> None:
    class Rows(tasks.Regression):
        def __init__(self) -> None:
            self.rows = [list(range(10_000, 10_000 + MOST_ELEMENTS)) for _ in range(30)]

    watched = Watched(Rows())
    looked_at: list[int] = []

    class Spy(list[int]):
        def __iter__(self) -> Any:
            looked_at.append(len(self))
            return super().__iter__()

    for container in watched.watch._kept._containers:
        container.value = Spy(container.value)
    watched.lane(lambda *_: None)
    assert COMPARED_ELEMENTS <= sum(looked_at) <= COMPARED_ELEMENTS + MOST_ELEMENTS
    for _ in range(30 * MOST_ELEMENTS // COMPARED_ELEMENTS):
        watched.lane(lambda *_: None)
    assert looked_at.count(MOST_ELEMENTS) >= 30


def test_an_object_of_a_class_from_dist_packages_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("of_a_distribution")
    module.__file__ = str(tmp_path / "dist-packages" / "of_a_distribution.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not is_users_own(type("Meter", (), {"__module__": module.__name__}))
    assert is_users_own(type("Meter", (), {"__module__": __name__}))


def test_each_name_is_told_once_and_one_of_layers_that_are_alike() -> None:
    names = ["layers.0.cache", "layers.1.cache", "self.flag"]
    assert news_of_names((), names) == ("layers.0.cache", "self.flag")
    sentences, told = of_names(("training 3",), names)
    assert len(sentences) == 1 and "'layers.0.cache', 'self.flag'" in sentences[0]
    assert of_names(told, ["layers.7.cache"]) == ([], told)
    assert len(of_names((), [f"self.{chr(letter)}" for letter in range(97, 123)])[1]) == 10


def test_an_endless_structure_is_looked_at_for_a_while() -> None:
    ring: list[Any] = []
    ring.append(ring)
    wide = [[number] for number in range(900)]
    kept = KeptValues(nn.Linear(1, 1))
    endless = [[list(range(900)) for _ in range(90)] for _ in range(30)]
    kept.look_at([("ring", ring), ("wide", [wide] * 500), ("endless", endless), ("last", last := [1])])
    assert kept.change() is None
    last.append(2)
    assert kept.change() == Change("last", "a list")


def test_a_lane_of_ten_modules_costs_a_few_microseconds() -> None:
    """Compared with the time of plain additions, so that it holds on a slow machine; 16 times as long would fail."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    task = type("Ten", (tasks.Regression,), {"model": lambda _: model})()
    watched = Watched(task)
    addition = min(timeit.repeat("s = 0\nfor i in range(100): s += i", number=200, repeat=20))
    cost = min(timeit.repeat(watched.watch.put_back, number=200, repeat=20))
    assert cost < 4 * addition, f"{cost / 200 * 1e6:.1f} µs, and 100 additions take {addition / 200 * 1e6:.1f} µs"


def _tensor(passing: Any) -> torch.Tensor:
    tensor: torch.Tensor = passing[0] if isinstance(passing, tuple) else passing
    return tensor.detach()


class Mean:
    """Keeps a mean of what passes through it."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def __call__(self, *passing: Any) -> None:
        self.value.mul_(0.9).add_(_tensor(passing[-1]).float().mean(), alpha=0.1)


def _add_to(total: dict[str, torch.Tensor], *passing: Any) -> None:
    total["sum"].add_(_tensor(passing[-1]).float().sum())


@pytest.mark.parametrize("kind", ["object", "method", "partial"])
@pytest.mark.parametrize("where", ["register_forward_hook", "register_forward_pre_hook", "tensor"])
def test_what_a_hook_of_the_model_keeps_is_watched_as_well(kind: str, where: str) -> None:
    hooks = {"object": Mean(), "method": Mean().__call__, "partial": partial(_add_to, {"sum": torch.zeros(1)})}
    hook: Any = hooks[kind]

    class Hooked(tasks.Regression):
        def model(self) -> nn.Module:
            model = super().model()
            if where == "tensor":
                next(model.parameters()).register_hook(hook)  # type: ignore[no-untyped-call]
            else:
                getattr(model, where)(hook)
            return model

    watched = Watched(Hooked())
    watched.lane(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="changed in loss"):
        watched.lane(lambda _, model: model(torch.ones(2, _inputs(model))).sum().backward())


def _inputs(model: nn.Module) -> int:
    return int(next(model.parameters()).shape[1])
