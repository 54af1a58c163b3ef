"""Exceptions of torch itself, as a newcomer meets them: the hint is there, and is about what was done."""

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quorate.core.errors import UserCodeError
from quorate.core.user_code import blame_user_code
from quorate.spec.job import JobSpec
from quorate.task.hints import Share, hint_for
from quorate.task.task import Task


def raised_by(mistake: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:
        mistake()
    assert isinstance(raised.value, Exception)
    return raised.value


def share(samples: int, batch_samples: int, **keys: object) -> Share:
    usual = {"task": "a.b:C", "batch_size": 4, "lanes": 4, "steps": 1}
    return Share(samples, batch_samples, JobSpec.model_validate({**usual, **keys}))


def lonely() -> object:
    return nn.BatchNorm1d(2)(torch.zeros(1, 2))


DOUBLES = torch.from_numpy(numpy.ones((2, 1, 3, 3)))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: nn.Linear(3, 2)(DOUBLES), ".float()"),
        (lambda: nn.Conv2d(1, 2, 3)(DOUBLES), ".float()"),
        (lambda: nn.Linear(3, 2)(torch.ones(2, 3, dtype=torch.long)), ".float()"),
        (lambda: F.cross_entropy(torch.zeros(2, 3), torch.ones(2)), ".long()"),
        (lambda: F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3])), "a model with at least 4 outputs"),
    ],
)
def test_a_mistake_that_torch_tells_in_its_own_terms_gets_a_hint(mistake: Callable[[], object], words: str) -> None:
    assert words in hint_for(raised_by(mistake))


def calls_backward() -> None:
    loss = torch.ones(())
    loss.backward()  # type: ignore[no-untyped-call]


def calls_log() -> None:
    Task().log("accuracy", 0.5, prog_bar=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [(calls_backward, "Leave loss.backward() out"), (calls_log, "Leave prog_bar out: self.log(name, value)")],
)
def test_what_other_libraries_want_and_quorate_does_itself(mistake: Callable[[], object], words: str) -> None:
    assert words in hint_for(raised_by(mistake))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("where", ["model()", "loss()"])
def test_a_gpu_that_is_not_there_is_told_with_what_to_leave_out(where: str) -> None:
    error = raised_by(lambda: nn.Linear(2, 2).cuda())
    with pytest.raises(UserCodeError, match=r"Leave out \.cuda\(\) and \.to"):
        blame_user_code(error, where)
    with pytest.raises(UserCodeError) as other:
        blame_user_code(ValueError("x"), where)
    assert ".cuda()" not in str(other.value)


ALLOWED = "`deterministic: false` in the job file allows it; the bits may then differ from run to run."


def unrepeatable(kernel: str) -> RuntimeError:
    """As torch says it of a kernel of a GPU."""
    return RuntimeError(
        f"{kernel} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. "
        "You can turn off determinism just for this operation, or you can use the 'warn_only=True' option, if that's "
        "acceptable for your application. You can also file an issue at https://github.com/pytorch/pytorch/issues to "
        "help us prioritize adding deterministic support for this operation."
    )


def test_a_kernel_that_cannot_repeat_is_named_with_what_can() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        error = raised_by(lambda: torch.zeros(4).put_(torch.tensor([0]), torch.ones(1)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert str(error) == str(unrepeatable("put_")), "torch says it otherwise now"
    with pytest.raises(UserCodeError) as told:
        blame_user_code(error, "loss()", hint_for)
    assert str(told.value) == (
        "RuntimeError: put_ does not have a deterministic implementation (in loss()). To get the same bits each time: "
        f"x.view(-1)[index] = values, or x.view(-1).index_add_(0, index, values) to accumulate. {ALLOWED}"
    )


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("adaptive_avg_pool2d_backward_cuda", "AvgPool2d with a kernel size"),
        ("adaptive_max_pool2d_backward_cuda", "MaxPool2d with"),
        ("fractional_max_pool3d_backward_cuda", "MaxPool3d with"),
        ("adaptive_avg_pool3d_backward_cuda", "Conv3d"),
        ("avg_pool3d_backward_cuda", "Conv3d"),
        ("max_unpooling2d_forward_out", "transposed"),
        ("upsample_bicubic2d_backward_out_cuda", "nearest"),
        ("reflection_pad2d_backward_cuda", "replicate"),
        ("nll_loss2d_forward_out_cuda_template", "flat values"),
        ("ctc_loss_backward_gpu", ".cpu()"),
        ("embedding_bag_backward_cuda_max", "amax()"),
        ("_histc_cuda with floating point input", "bucketize"),
        ("_bincount_cuda", "index_add_"),
        ("median CUDA with indices output", "sort(stable=True)"),
        ("kthvalue CUDA", "sort(stable=True)"),
        ("grid_sampler_2d_backward_cuda", "gather()"),
        ("cumsum_cuda_kernel", "triangular"),
    ],
)
def test_the_known_ones_have_an_alternative(kernel: str, words: str) -> None:
    hint = hint_for(unrepeatable(kernel))
    assert words in hint
    assert hint.endswith(ALLOWED)


def test_of_an_unknown_one_only_the_key_is_told() -> None:
    assert hint_for(unrepeatable("fft_of_tomorrow_cuda")) == ALLOWED


def test_the_alternatives_compute_the_same() -> None:
    x, classes = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    assert torch.allclose(nn.AdaptiveAvgPool2d(1)(x), x.mean((2, 3), keepdim=True), atol=1e-6)
    assert torch.equal(nn.AdaptiveMaxPool2d(1)(x), x.amax((2, 3), keepdim=True))
    flat = F.cross_entropy(x.movedim(1, -1).flatten(0, -2), classes.flatten())
    assert torch.allclose(F.cross_entropy(x, classes), flat)
    assert torch.allclose(x.cumsum(-1), x @ torch.ones(4, 4).triu(), atol=1e-6)
    places, weights = torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0, 4.0])
    assert torch.equal(torch.bincount(places, weights), torch.zeros(3).index_add_(0, places, weights))
    one, other = torch.zeros(2, 2), torch.zeros(2, 2)
    other.view(-1).index_add_(0, places, weights)
    assert torch.equal(one.put_(places, weights, accumulate=True), other)


def test_a_graph_that_is_used_twice() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    torch.autograd.backward(loss)
    assert ".detach()" in hint_for(raised_by(lambda: torch.autograd.backward(loss)))


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        (share(1, 4), "4 samples for 4 lanes (batch_size: 4). Use a batch_size of at least 8, or use fewer lanes."),
        (
            share(1, 8, batch_size=8, accumulate=2),
            "8 samples for 4 lanes × accumulate 2 (batch_size: 8). "
            "Use a batch_size of at least 16, or use fewer lanes.",
        ),
        (
            share(1, 5, batch_size=8, last_batch="keep"),
            "5 samples for 4 lanes (batch_size: 8; last_batch: keep). "
            "Drop such a rest (last_batch: drop), or use fewer lanes.",
        ),
    ],
)
def test_a_single_sample_cannot_be_normalized(shared: Share, words: str) -> None:
    hint = hint_for(raised_by(lonely), shared)
    assert hint.startswith("Batch normalization needs at least 2 samples at a time, and this lane had 1: ")
    assert hint.endswith(words)


def test_a_layer_that_does_not_fit_is_told_with_the_one_that_does() -> None:
    hint = hint_for(raised_by(lambda: nn.Linear(3, 2)(torch.zeros(2, 4))))
    assert "The second takes 3 values a row and the first has 4." in hint
    assert "nn.Linear(4, 2)" in hint


def test_what_is_not_surely_right_is_not_said() -> None:
    assert hint_for(raised_by(lonely), share(3, 12)) == ""
    assert hint_for(raised_by(lambda: torch.zeros(2, 4) + torch.zeros(2, 3))) == ""
    assert hint_for(KeyError("labels")) == ""
