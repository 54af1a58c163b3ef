"""A model whose tensors are made one after the other has the bits of one that was built at once."""

import copy
import math
import pickle
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity, profile

from bert import Bert
from gpt2 import Gpt2
from quorate.data.streams import seed_generators
from quorate.strategies.gangs.deferred_init import CannotDefer, Deferred, deferred
from quorate.strategies.gangs.tensor_record import Plan
from resnet import ResNet
from vit import VisionTransformer

Build = Callable[[], nn.Module]
ZOO: dict[str, Build] = {
    "resnet": lambda: ResNet(50, 10, width=4),
    "vit": lambda: VisionTransformer(16, 4, 10, 16, 2, 2),
    "gpt2": lambda: Gpt2(61, 8, 16, 2, 2),
    "bert": lambda: Bert(61, 8, 16, 2, 2, 0.1),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "embedding with padding": lambda: nn.Embedding(9, 4, padding_idx=3),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.PReLU()),
    "double": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)).double(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(33, 6), nn.Linear(6, 3)).to(torch.bfloat16),
    "to the CPU": lambda: nn.Linear(5, 6).to("cpu", torch.float64).cpu(),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "old weight norm": lambda: torch.nn.utils.weight_norm(nn.Linear(5, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
    "copies of one layer": lambda: nn.Sequential(*(copy.deepcopy(nn.Linear(3, 3)) for _ in range(3))),
    "after a batch": lambda: _after_a_batch(
        nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.Dropout(), nn.LazyLinear(2))
    ),
}


def of_zoo(build: Build) -> Build:
    ZOO[build.__name__.strip("_").replace("_", " ")] = build
    return build


def _after_a_batch(model: nn.Module) -> nn.Module:
    model(torch.randn(8, 3))
    return model


@of_zoo
def initialised_by_hand() -> nn.Module:
    model = nn.ParameterDict()
    inits: dict[str, Callable[[torch.Tensor], object]] = {
        "uniform": nn.init.uniform_,
        "normal": nn.init.normal_,
        "truncated": nn.init.trunc_normal_,
        "orthogonal": nn.init.orthogonal_,
        "wide orthogonal": lambda weight: nn.init.orthogonal_(weight.t(), gain=2.0).t(),
        "kaiming": nn.init.kaiming_normal_,
        "xavier": nn.init.xavier_uniform_,
        "sparse": lambda weight: nn.init.sparse_(weight, 0.3),
        "eye": nn.init.eye_,
        "constant": lambda weight: nn.init.constant_(weight, 0.3),
        "exponential": lambda weight: weight.data.exponential_(),
        "in part": lambda weight: weight.data[2:5].normal_(),
        "by columns": lambda weight: weight.data[:, 1].normal_(),
    }
    for name, init in inits.items():
        model[name] = nn.Parameter(torch.zeros(7, 6))
        init(model[name])
    model["dirac"] = nn.init.dirac_(nn.Parameter(torch.empty(4, 4, 3)))
    model["scaled"] = nn.Parameter(torch.randn(40) * 0.02)
    model["of a generator"] = nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(7)))
    model["permuted"] = nn.Parameter(torch.randperm(9).float())
    model["chosen"] = nn.Parameter(torch.multinomial(torch.ones(9), 4).float(), requires_grad=False)
    return model


@of_zoo
def drawn_twice() -> nn.Module:
    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    return nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)), nn.LayerNorm(20)).apply(init)


@of_zoo
def tied() -> nn.Module:
    model = nn.ModuleDict({"read": nn.Embedding(9, 4), "score": nn.Linear(4, 9, bias=False)})
    model["score"].weight = model["read"].weight
    return model


class Buffers(nn.Module):
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.register_buffer("kernel", torch.tensor([1.0, 2.0, 1.0]) / 4)
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.register_buffer("real", torch.from_numpy(numpy.arange(5.0)))
        angles = torch.outer(torch.arange(6), 10000 ** -(torch.arange(0, 4, 2) / 4))
        self.register_buffer("places", torch.zeros(6, 4))
        self.places[:, 0::2] = angles.sin()
        self.places[:, 1::2] = angles.cos()
        self.register_buffer("start", self.places[:, :2])  # a view of another
        index = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
        self.register_buffer("distance", index[:, :, None] - index[:, None, :])
        self.register_buffer("chosen", torch.arange(7)[torch.arange(7) % 2 == 0])
        self.register_buffer("where", (torch.eye(3) > 0).nonzero())
        self.weight = nn.Parameter(torch.empty(3, 3))
        nn.init.normal_(self.weight)


@of_zoo
def buffers() -> nn.Module:
    return Buffers()


@of_zoo
def from_numpy_and_python() -> nn.Module:
    model = nn.ParameterDict()
    values = numpy.random.randn(4, 3)
    model["copied"] = nn.Parameter(torch.zeros(4, 3))
    model["copied"].data.copy_(torch.from_numpy(values))
    values[:] = 0.0  # comes too late to matter
    model["real"] = nn.Parameter(torch.from_numpy(numpy.random.randn(4, 3)).mul_(0.5))
    model["also real"] = model["real"]
    model["mixed"] = nn.Parameter(torch.randn(3) + torch.as_tensor(numpy.random.randn(3)) + random.random())
    model["loaded"] = nn.Parameter(torch.zeros(2))
    nn.Module.load_state_dict(model, {"loaded": torch.tensor([1.0, 2.0])}, strict=False)
    return model


@of_zoo
def values_that_are_not_drawn() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
    more = torch.linspace(0, 0.5, 2).tolist() + [float(x) for x in numpy.asarray(torch.arange(2))]
    assert torch.allclose(torch.ones(3).cumsum(0)[-1:], torch.tensor([3.0]))
    return nn.Sequential(*(nn.Linear(2 + round(10 * rate), 2) for rate in rates + more))


@of_zoo
def states_of_generators() -> nn.Module:
    model = nn.ParameterDict()
    generator = torch.Generator().manual_seed(11)
    model["first"] = nn.Parameter(torch.randn(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model["seeded"] = nn.Parameter(torch.randn(3))
        model["own"] = nn.Parameter(torch.randn(3, generator=generator))
    state = torch.get_rng_state()
    model["after"] = nn.Parameter(torch.randn(3))
    model["own again"] = nn.Parameter(torch.empty(3).uniform_(generator=generator))
    torch.set_rng_state(state)
    model["same as after"] = nn.Parameter(torch.randn(3))
    generator.set_state(state)
    model["same again"] = nn.Parameter(torch.randn(3, generator=generator))
    return model


@of_zoo
def another_default_type() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(4, 4)
        model.register_buffer("halves", torch.arange(4) / 2)
    finally:
        torch.set_default_dtype(torch.float32)
    model.register_buffer("thirds", torch.arange(4) / 3)
    return model


@of_zoo
def one_from_another() -> nn.Module:
    student = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    teacher = copy.deepcopy(student)
    for weight in student.parameters():
        weight.data.mul_(0.5)
    with torch.no_grad():
        for of_teacher, of_student in zip(teacher.parameters(), student.parameters(), strict=True):
            of_teacher.lerp_(of_student, 0.3)
    nn.init.normal_(student[0].weight)  # type: ignore[arg-type]
    copied = nn.Linear(4, 4)
    copied.load_state_dict(student[1].state_dict())
    copied.weight.data = copied.weight.data.t()
    copied.bias.data.cpu().to(torch.from_numpy(numpy.ones(1, numpy.float32))).zero_()
    numbers = torch.from_numpy(numpy.ones(4)).to(copied.weight).type_as(copied.bias)
    doubled = copied.weight.data[0].to("cpu", copy=True).mul_(2)
    copied.register_buffer("numbers", doubled + numbers.to("cpu", copy=True))
    return nn.ModuleList([student, teacher, copied])


@of_zoo
def one_storage_for_several() -> nn.Module:
    whole = torch.empty(12, 4)
    for part in whole.chunk(3):
        nn.init.xavier_uniform_(part)
    model = nn.ParameterDict({"query": nn.Parameter(whole[:4]), "rest": nn.Parameter(whole[4:])})
    torch.add(whole, 1.0, out=whole)
    torch._foreach_mul_([model["query"].data, model["rest"].data], 0.5)
    return model


@of_zoo
def never_written() -> nn.Module:
    return nn.ParameterDict({"nothing": nn.Parameter(torch.empty(0, 4)), "zero": nn.Parameter(torch.zeros(()))})


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def materialized(plan: Deferred) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}

    def keep(name: str, whole: torch.Tensor) -> None:
        assert name not in made
        made[name] = whole.clone(memory_format=torch.preserve_format)

    plan.materialize(keep)
    return made


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_every_tensor_has_the_bits_of_a_plain_build(name: str) -> None:
    assert_as_plain(ZOO[name])


def assert_as_plain(build: Build) -> None:
    seed_generators(5)
    plain = build()
    after = torch.get_rng_state(), numpy.random.random(), random.random()

    seed_generators(5)
    plan = deferred(build)
    after_recording = numpy.random.random(), random.random()
    torch.manual_seed(99)  # whatever is drawn in between
    made = materialized(plan)

    assert all(tensor.is_meta for tensor in tensors(plan.model).values())
    assert torch.equal(torch.get_rng_state(), after[0])
    assert after_recording == after[1:]
    assert made.keys() == tensors(plain).keys()
    for name, expected in tensors(plain).items():
        deferred_one = tensors(plan.model)[name]
        assert made[name].dtype == deferred_one.dtype == expected.dtype
        assert deferred_one.stride() == expected.stride(), name
        assert deferred_one.requires_grad == expected.requires_grad
        assert type(deferred_one) is type(expected)
        assert torch.equal(made[name], expected), name


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "draw": lambda target, _: target.normal_(),
    "draw a row": lambda target, _: target[1].uniform_(),
    "draw a column": lambda target, _: target[:, 2].normal_(),
    "draw by another": lambda target, other: target.bernoulli_(other.sigmoid()),
    "fill": lambda target, _: target.fill_(0.5),
    "copy": lambda target, other: target.copy_(other),
    "copy a row": lambda target, other: target[0].copy_(other[2]),
    "add": lambda target, other: target.add_(other),
    "multiply into": lambda target, other: torch.mul(target, other, out=target),
}
NEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "same": lambda other: other,
    "round": lambda other: other.to(torch.bfloat16).float(),
    "dropout": lambda other: nn.functional.dropout(other, 0.3),
    "turn": lambda other: other.flip(0),
}
Program = list[tuple[str, int, int]]


def run(program: Program) -> nn.Module:
    """Three tensors, and what the program does to them."""
    tensors = [torch.randn(3, 4), torch.ones(3, 4), torch.empty(3, 4).uniform_()]
    for what, target, other in program:
        if what in NEW:
            tensors[target] = NEW[what](tensors[other])
        else:
            IN_PLACE[what](tensors[target], tensors[other])
    return nn.ParameterDict({str(number): nn.Parameter(tensor) for number, tensor in enumerate(tensors)})


@given(st.lists(st.tuples(st.sampled_from([*IN_PLACE, *NEW]), st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_any_program_gives_its_bits(program: Program) -> None:
    assert_as_plain(lambda: run(program))


def test_a_record_can_be_replayed_again() -> None:
    plan = deferred(ZOO["states of generators"])
    first, second = materialized(plan), materialized(plan)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tensors_that_are_plain_attributes_become_real() -> None:
    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.angles = torch.outer(torch.arange(3), torch.rand(4))
            self.tables = {"sin": [self.angles.sin()], "weight": self.weight, "name": "rotary"}
            self.constant = torch.from_numpy(numpy.ones(3))

    seed_generators(5)
    plain = Rotary()
    seed_generators(5)
    plan = deferred(Rotary)
    materialized(plan)
    assert isinstance(plan.model, Rotary)
    assert torch.equal(plan.model.angles, plain.angles)
    assert torch.equal(plan.model.tables["sin"][0], plain.tables["sin"][0])  # type: ignore[index]
    assert torch.equal(plan.model.constant, plain.constant)
    assert plan.model.tables["weight"] is plan.model.weight
    assert plan.model.weight.is_meta


class Change(NamedTuple):
    inputs: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    draw: bool | None = None


def test_what_nobody_reads_is_not_computed_and_what_is_drawn_for_others_is_dropped() -> None:
    zero, nothing = frozenset([0]), frozenset[int]()
    made: Any
    changed: Any
    drawn: Any
    made, changed, drawn = Change(nothing, zero, zero), Change(zero, zero, nothing), Change(nothing, zero, zero, True)
    plan = Plan([made, changed, drawn, changed, made, drawn, changed], [0], all_draws=True)
    assert [(step.number, step.is_dropped) for step in plan.steps] == [(2, True), (5, False), (6, False)]
    assert [step.number for step in Plan([made, changed, drawn, made], [0], all_draws=False).steps] == [3]


def stack(layers: int = 12, width: int = 128) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@of_zoo
def stack_drawn_twice() -> nn.Module:
    model = stack()
    for layer in model:
        nn.init.normal_(layer.weight)  # type: ignore[arg-type]
    return model


@of_zoo
def stack_converted() -> nn.Module:
    return stack().to(torch.bfloat16)


@of_zoo
def stack_scaled_afterwards() -> nn.Module:
    model = stack()
    for depth, weight in enumerate(model.parameters()):
        weight.data.div_(math.sqrt(1 + depth))
    return model


@of_zoo
def stack_with_a_copy() -> nn.Module:
    model = stack()
    return nn.ModuleList([model, copy.deepcopy(model)])


@of_zoo
def stack_read_before_it_is_drawn_again() -> nn.Module:
    model = stack()
    for layer in model:
        layer.register_buffer("scale", layer.weight.norm())  # type: ignore[operator]
    for layer in model:
        nn.init.normal_(layer.weight)  # type: ignore[arg-type]
    return model


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(
    "build",
    [
        stack,
        stack_drawn_twice,
        stack_converted,
        stack_scaled_afterwards,
        stack_with_a_copy,
        stack_read_before_it_is_drawn_again,
    ],
    ids=lambda build: build.__name__,
)
def test_memory_is_taken_for_one_tensor_at_a_time(build: Build) -> None:
    plan = deferred(build)
    largest = 128 * 128 * 4
    names: list[str] = []
    plan.materialize(lambda name, whole: names.append(name))  # what is allocated once is allocated now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        plan.materialize(lambda name, whole: names.append(name))
    assert len(names) == 2 * len(tensors(plan.model))

    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert largest <= peak <= 2.5 * largest


def _reads_a_drawn_value() -> nn.Module:
    numpy.random.random()
    return nn.Linear(2, 2) if torch.rand(1).item() < 2 else nn.Linear(3, 3)


def _branches_on_a_weight() -> nn.Module:
    model = nn.Linear(2, 2)
    if (model.weight > 10).any():
        nn.init.zeros_(model.weight)
    return model


def _takes_weights_to_numpy() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.data = torch.from_numpy(model.weight.detach().numpy() * 2)
    return model


def _writes_through_numpy() -> nn.Module:
    model = nn.ParameterDict({"table": nn.Parameter(torch.zeros(3))})
    model["table"].detach().numpy()[:] = 1.0
    return model


def _draws_into_an_array() -> nn.Module:
    return nn.ParameterDict({"table": nn.Parameter(torch.from_numpy(numpy.zeros(3)).normal_())})


def _makes_it_on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta").to_empty(device="cpu")


def _is_sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def _has_a_drawn_shape() -> nn.Module:
    return nn.ParameterDict({"some": nn.Parameter(torch.randn(9)[torch.rand(9) > 0.5])})


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (_reads_a_drawn_value, "item() reads a value that depends on aten.rand.default (at test_deferred_init.py:"),
        (_branches_on_a_weight, "item() reads a value that depends on aten.uniform_.default"),
        (_takes_weights_to_numpy, "numpy() reads a value that depends on aten.uniform_.default"),
        (_writes_through_numpy, "read-only"),
        (_draws_into_an_array, "aten.normal_.default changes a tensor made from other data, such as an array"),
        (_makes_it_on_meta, "on the meta device itself"),
        (_is_sparse, "cannot be recorded"),
        (_has_a_drawn_shape, "aten.index.Tensor reads a value that depends on aten.rand"),
        (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), "aten.allclose.default reads a value"),
    ],
)
def test_what_needs_values_is_refused_with_its_place(build: Build, what: str) -> None:
    seed_generators(5)
    before = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    with pytest.raises(CannotDefer, match=r"model\(\) cannot be built in parts") as refused:
        deferred(build)
    assert what in str(refused.value)
    assert "test_deferred_init.py:" in str(refused.value)
    after = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    assert str(before) == str(after)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_a_file_of_weights_is_refused(tmp_path: Any) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return model

    with pytest.raises(CannotDefer, match=r"loads tensors from a file .*initial_weights"):
        deferred(build)


def test_a_mistake_of_the_build_is_raised_as_it_is() -> None:
    def build() -> nn.Module:
        raise ValueError("a width of 7 cannot be shared equally by 2 heads")

    with pytest.raises(ValueError, match=r"^a width of 7"):
        deferred(build)
    assert not torch.zeros(1).is_meta
