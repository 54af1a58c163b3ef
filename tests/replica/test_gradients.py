"""Gradients are taken as autograd gives them: bit for bit, None where there is none, into buffers that stay theirs."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plain_gradients import plain_gradients
from quorate.core.errors import UnsupportedModelError
from quorate.replica import flat_gradients


@pytest.fixture(autouse=True, params=[0, 2**40], ids=["each at once", "all together"])
def moved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_gradients, "LARGE", request.param)


class Pair:
    """Two parameters of different types and shapes, with their gradients in lanes 2 and 3."""

    def __init__(self, bucket_mb: float = 25.0) -> None:
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
        self.gradients = plain_gradients([("weight", self.weight), ("bias", self.bias)], range(2, 4), bucket_mb)

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        self.gradients.backward(loss, weight, None, retain=False)


def test_each_type_has_its_own_bucket_and_each_parameter_its_view() -> None:
    gradients = Pair().gradients
    assert set(gradients.lanes) == {2, 3}
    for flat in (gradients.total, *gradients.lanes.values()):
        assert [bucket.dtype for bucket in flat.buckets] == [torch.bfloat16, torch.float32]
        assert [tuple(view.shape) for view in flat.views] == [(2, 2), (3,)]
        flat.views[0].fill_(5)
        assert flat.buckets[1].tolist() == [5.0] * 4


def test_small_buckets_hold_the_same_views() -> None:
    parameters = [(str(i), nn.Parameter(torch.zeros(300))) for i in range(5)]
    gradients = plain_gradients(parameters, range(1), bucket_mb=0.0024)
    assert [bucket.numel() for bucket in gradients.total.buckets] == [600, 600, 300]
    assert len(gradients.total.views) == 5


def test_a_lanes_gradient_lies_in_its_own_buffer() -> None:
    pair = Pair()
    for lane, factor in ((2, 1.0), (3, 10.0)):
        pair.gradients.begin(lane)
        pair.backward((pair.weight * factor).sum() + pair.bias.sum().float())
        assert pair.gradients.finish() == 0b11
    assert pair.gradients.lanes[2].views[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert pair.gradients.lanes[3].views[0].tolist() == [[10.0, 10.0], [10.0, 10.0]]


def test_micro_batches_add_up_with_their_weights() -> None:
    pair = Pair()
    pair.gradients.begin(2)
    pair.backward(pair.weight.sum(), 0.25)
    pair.backward(pair.weight.square().sum(), 0.5)
    assert pair.gradients.finish() == 0b01
    assert pair.gradients.lanes[2].views[0].tolist() == [[1.25, -1.75], [3.25, 4.25]]
    assert pair.bias.grad is None


def test_a_parameter_without_gradient_keeps_none_and_counts_as_zeros() -> None:
    pair = Pair()
    pair.gradients.lanes[2].views[1].fill_(7)
    pair.gradients.begin(2)
    pair.backward(pair.weight.sum())
    assert pair.gradients.finish() == 0b01
    assert pair.gradients.lanes[2].views[1].tolist() == [0.0, 0.0, 0.0]


def test_a_negative_zero_is_kept() -> None:
    pair = Pair()
    pair.gradients.begin(2)
    pair.backward((pair.weight * -0.0).sum())
    pair.gradients.finish()
    assert torch.signbit(pair.gradients.lanes[2].views[0]).all()


def test_a_lane_starts_afresh_after_another_try() -> None:
    """A step that is redone must not add to what its first try left."""
    pair = Pair()
    for _ in range(2):
        pair.gradients.begin(2)
        pair.backward(pair.weight.sum())
        pair.gradients.finish()
    assert pair.gradients.lanes[2].views[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_lane_without_samples_is_zeros() -> None:
    pair = Pair()
    for bucket in pair.gradients.lanes[3].buckets:
        bucket.fill_(9)
    pair.gradients.clear(3)
    assert all(not bucket.any() for bucket in pair.gradients.lanes[3].buckets)


def test_installing_gives_the_sum_to_those_that_have_one() -> None:
    pair = Pair()
    pair.gradients.total.views[1].fill_(3)
    pair.gradients.install(0b10)
    assert pair.weight.grad is None
    assert pair.bias.grad is pair.gradients.total.views[1]


def test_only_the_named_inputs_get_gradients() -> None:
    pair = Pair()
    pair.gradients.begin(2)
    loss = pair.weight.sum() + pair.bias.sum().float()
    pair.gradients.backward(loss, 1.0, [pair.bias], retain=True)
    assert pair.gradients.finish() == 0b10
    pair.gradients.backward(loss, 1.0, [pair.weight], retain=False)
    assert pair.gradients.finish() == 0b11


def test_closing_lets_the_parameters_go() -> None:
    pair = Pair()
    pair.gradients.close()
    pair.weight.sum().backward()  # type: ignore[no-untyped-call]
    assert pair.weight.grad is not None
    assert pair.weight.grad is not pair.gradients.total.views[0]


def test_a_channels_last_gradient_is_taken_by_value() -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    gradients = plain_gradients([("kernel", kernel)], range(1), 25.0)
    factor = torch.randn(4, 3, 2, 2)
    gradients.begin(0)
    gradients.backward((kernel * factor).sum(), 1.0, None, retain=False)
    gradients.finish()
    assert torch.equal(gradients.lanes[0].views[0], factor)


def detach_between(pair: Pair) -> None:
    pair.backward(pair.weight.sum())
    pair.weight.grad = None
    pair.backward(pair.weight.sum())


def detach_at_the_end(pair: Pair) -> None:
    pair.backward(pair.weight.sum())
    pair.weight.grad = torch.zeros(2, 2)
    pair.gradients.finish()


def backward_by_oneself(pair: Pair) -> None:
    pair.weight.sum().backward()  # type: ignore[no-untyped-call]
    pair.backward(pair.weight.sum())


def put_one_there(pair: Pair) -> None:
    pair.weight.grad = torch.ones(2, 2)
    pair.backward(pair.weight.sum())


def with_a_graph_of_its_own(pair: Pair) -> None:
    def keep_graph(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * pair.weight

    pair.weight.register_hook(keep_graph)  # type: ignore[no-untyped-call]
    pair.gradients.begin_pass(is_last=False)
    torch.autograd.backward(pair.weight.square().sum(), create_graph=True)
    pair.gradients.end_pass()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    ("act", "text"),
    [
        (detach_between, "'weight' was detached"),
        (detach_at_the_end, "'weight' was detached.*zero_grad"),
        (backward_by_oneself, r"'weight' was computed by the task itself"),
        (put_one_there, r"'weight' was computed by the task itself"),
        (with_a_graph_of_its_own, "'weight' carries a graph"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused_by_name(act: Any, text: str) -> None:
    pair = Pair()
    pair.gradients.begin(2)
    with pytest.raises(UnsupportedModelError, match=text):
        act(pair)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    rows = nn.Embedding(4, 2, sparse=True)
    gradients = plain_gradients(list(rows.named_parameters()), range(1), 25.0)
    gradients.begin(0)
    with pytest.raises(UnsupportedModelError, match=r"'weight' is sparse.*sparse=False"):
        gradients.backward(rows(torch.tensor([1])).sum(), 1.0, None, retain=False)


def announced_by(pair: Pair) -> list[int]:
    announced: list[int] = []
    pair.gradients.announce(announced.append)
    return announced


def test_buckets_of_the_last_lane_are_announced_while_its_last_pass_runs() -> None:
    pair = Pair()
    announced = announced_by(pair)
    seen: list[list[int]] = []
    pair.weight.register_hook(lambda _: seen.append(list(announced)))  # type: ignore[no-untyped-call]
    for lane in (2, 3):
        pair.gradients.begin(lane)
        pair.backward(pair.weight.sum() + pair.bias.sum().float())
        loss = pair.weight.mul(2).sum() + pair.bias.sum().float()
        pair.gradients.backward(loss, 1.0, is_last=True)
        assert announced == ([] if lane == 2 else [0, 1]), "the bias has the first bucket, the weight the second"
        pair.gradients.finish()
    assert len(seen) == 4
    assert announced == [0, 1], "each is announced once"
    assert pair.gradients.lanes[3].views[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_bucket_waits_for_those_before_it_and_for_gradients_that_never_come() -> None:
    pair = Pair()
    announced = announced_by(pair)
    pair.gradients.begin(3)
    pair.gradients.backward(pair.weight.sum(), 1.0, is_last=True)
    assert announced == [], "the bias, whose bucket is first, has no gradient"
    pair.gradients.lanes[3].views[1].fill_(7)
    assert pair.gradients.finish() == 0b01
    assert announced == [0, 1]
    assert not pair.gradients.lanes[3].views[1].any(), "zeroed before it was announced"


def test_a_last_lane_without_samples_is_announced_too() -> None:
    pair = Pair()
    announced = announced_by(pair)
    pair.gradients.clear(2)
    assert announced == []
    pair.gradients.clear(3)
    assert announced == [0, 1]


def test_a_gradient_that_grows_after_it_was_announced_is_refused() -> None:
    pair = Pair()
    announced_by(pair)
    pair.gradients.begin(3)
    pair.gradients.backward(pair.weight.sum() + pair.bias.sum().float(), 1.0, is_last=True)
    with pytest.raises(UnsupportedModelError, match=r"'bias' was added to after it had been sent.*overlap: false"):
        pair.gradients.backward(pair.bias.sum().float(), 1.0, is_last=True)


def test_one_parameter_told_of_twice_does_not_stand_for_another() -> None:
    """As with reentrant checkpointing of a parameter that is used twice."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = plain_gradients([("unused", unused), ("used", used)], range(1), 25.0)
    sent: list[list[float]] = []
    gradients.announce(lambda index: sent.append(gradients.lanes[0].buckets[index].tolist()))
    gradients.lanes[0].views[0].fill_(7)  # as the step before has left it
    gradients.begin(0)
    gradients.backward(used_twice(used).sum(), 1.0, is_last=True)
    assert sent == []
    assert gradients.finish() == 0b10
    assert sent == [[2.0, 2.0, 0.0, 0.0]]


def test_a_parameter_told_of_again_after_its_bucket_was_sent_is_refused() -> None:
    used = nn.Parameter(torch.ones(2))
    gradients = plain_gradients([("used", used)], range(1), 25.0)
    gradients.announce(lambda _: None)
    gradients.begin(0)
    with pytest.raises(UnsupportedModelError, match=r"'used' was added to after it had been sent.*overlap: false"):
        gradients.backward(used_twice(used).sum(), 1.0, is_last=True)


def used_twice(parameter: nn.Parameter) -> torch.Tensor:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * parameter

    inputs = torch.ones(2, requires_grad=True)
    result: torch.Tensor = checkpoint(multiply, checkpoint(multiply, inputs, use_reentrant=True), use_reentrant=True)
    return result


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointed_layers_are_announced_as_others_are(reentrant: bool) -> None:
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def loss(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x.square().sum()

    inputs = torch.randn(4, 3, requires_grad=True)
    gradients = plain_gradients(list(layers.named_parameters()), range(1), bucket_mb=0.00004)
    announced: list[int] = []
    gradients.announce(announced.append)
    gradients.begin(0)
    gradients.backward(loss(inputs), 1.0, is_last=True)
    assert announced == list(range(len(gradients.plan)))
    gradients.finish()
    gradients.close()
    layers.zero_grad()
    loss(inputs).backward()  # type: ignore[no-untyped-call]
    plain = [parameter.grad for parameter in layers.parameters()]
    assert all(p is not None and torch.equal(v, p) for v, p in zip(gradients.lanes[0].views, plain, strict=True))


def test_a_gradient_that_a_hook_of_the_model_drops_counts_as_zeros() -> None:
    weight = nn.Parameter(torch.ones(2))

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    gradients = plain_gradients([("weight", weight)], range(1), 25.0)
    sent: list[list[float]] = []
    gradients.announce(lambda index: sent.append(gradients.lanes[0].buckets[index].tolist()))
    gradients.lanes[0].views[0].fill_(7)
    gradients.begin(0)
    gradients.backward(weight.sum(), 1.0, is_last=True)
    assert gradients.finish() == 0
    assert sent == [[0.0, 0.0]]
