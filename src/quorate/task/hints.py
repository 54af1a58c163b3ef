"""Hints for exceptions that user code meets in training: each is surely right for what was raised, or there is none.
The most frequent is memory that could not be had."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from quorate.core.machine import is_shortage
from quorate.core.user_code import remedy_in, users_lines
from quorate.spec.job import JobSpec

OUT_OF_MEMORY = (
    r"out of memory|DefaultCPUAllocator: can't allocate|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)


def out_of_memory(error: BaseException) -> BaseException | None:
    """What tells that memory could not be had, of the device or of the host: the error itself, or its cause."""
    for each in (error, error.__cause__):
        is_short = isinstance(each, RuntimeError) and re.search(OUT_OF_MEMORY, str(each))
        if each is not None and (is_short or isinstance(each, torch.OutOfMemoryError) or is_shortage(each)):
            return each
    return None


def what_needs_less_memory(spec: JobSpec) -> str:
    """What to change in a job whose lanes do not fit into memory."""
    activations = (
        ""
        if spec.memory.checkpoint_activations
        else "compute activations again (memory: {checkpoint_activations: true}), "
    )
    return (
        f"To need less: a smaller batch_size (now {spec.batch_size}), {activations}a larger accumulate (now "
        f"{spec.accumulate}), or more lanes (now {spec.lanes}) on more workers."
    )


class Share(NamedTuple):
    """What a lane had to work on: its samples of a batch, in a job."""

    samples: int
    batch_samples: int
    spec: JobSpec


def hint_for(error: BaseException, share: Share | None = None) -> str:
    """A hint that is surely right for this exception, or nothing."""
    if isinstance(error, RuntimeError) and "loss.backward(" in "".join(users_lines(error)):
        return "Leave loss.backward() out: Quorate calls it, of what loss() returns or run.step() is given."
    return remedy_in(_HINTS, str(error), share)


def _too_large(_: re.Match[str], share: Share | None) -> str:
    if share is None:
        return ""
    spec = share.spec
    shrink = " `on_out_of_memory: shrink` raises accumulate by itself." if spec.strategy.kind == "ring" else ""
    samples = "1 sample" if share.samples == 1 else f"{share.samples} samples"
    return f"Memory ran out with {samples} at a time. {what_needs_less_memory(spec)}{shrink}"


def _lonely_sample(_: re.Match[str], share: Share | None) -> str:
    if share is None or share.samples != 1:
        return ""
    spec = share.spec
    accumulate = f" × accumulate {spec.accumulate}" if spec.accumulate > 1 else ""
    is_rest = share.batch_samples < spec.batch_size
    kept = "; last_batch: keep" if is_rest else ""
    enough = 2 * spec.lanes * spec.accumulate
    remedy = "Drop such a rest (last_batch: drop)" if is_rest else f"Use a batch_size of at least {enough}"
    return (
        f"Batch normalization needs at least 2 samples at a time, and this lane had 1: {share.batch_samples} samples "
        f"for {spec.lanes} lanes{accumulate} (batch_size: {spec.batch_size}{kept}). {remedy}, or use fewer lanes."
    )


def _class_out_of_bounds(found: re.Match[str], _: Share | None) -> str:
    needed = int(found[1]) + 1
    return f"Classes count from 0, so a target of {found[1]} needs a model with at least {needed} outputs."


def _layer_that_does_not_fit(found: re.Match[str], _: Share | None) -> str:
    return (
        f"The second takes {found[3]} values a row and the first has {found[2]}. If this is a layer, make it "
        f"nn.Linear({found[2]}, {found[4]}), or fix what comes before it."
    )


def _cannot_repeat(found: re.Match[str], _: Share | None) -> str:
    instead = remedy_in(_INSTEAD, found[1])
    allowed = "`deterministic: false` in the job file allows it; the bits may then differ from run to run."
    return f"To get the same bits each time: {instead}. {allowed}" if instead else allowed


_INSTEAD = (
    (r"adaptive_avg_pool2d", "AvgPool2d with a kernel size, or x.mean((2, 3), keepdim=True) for one value a channel"),
    (r"(adaptive|fractional)_max_pool2d", "MaxPool2d with a kernel size, or x.amax((2, 3), keepdim=True)"),
    (r"(adaptive|fractional)_max_pool3d", "MaxPool3d with a kernel size, or x.amax((2, 3, 4), keepdim=True)"),
    (r"avg_pool3d", "Conv3d with fixed weights, or x.mean((2, 3, 4), keepdim=True) for one value a channel"),
    (r"max_unpool", 'interpolate(mode="nearest") or a transposed convolution'),
    (r"upsample", 'interpolate(mode="nearest"), or fixed matrices: rows @ x @ columns'),
    (r"reflection_pad", 'padding in mode "replicate" or "circular", or torch.cat() with flipped edges'),
    (r"nll_loss2d", "flat values: cross_entropy(logits.movedim(1, -1).flatten(0, -2), target.flatten())"),
    (r"ctc_loss", "ctc_loss() on the CPU, of log_probs.cpu() and targets.cpu()"),
    (r"embedding_bag", "Embedding and then amax() over each bag"),
    (r"^put_", "x.view(-1)[index] = values, or x.view(-1).index_add_(0, index, values) to accumulate"),
    (r"scatter_reduce", 'scatter_reduce() with "sum", of logarithms where values are positive'),
    (r"scatter_add", "index_add_() along one dimension, or a product with a one-hot matrix"),
    (r"histc", "torch.bincount(torch.bucketize(x, boundaries)), without weights"),
    (r"bincount", "zeros.index_add_(0, input, weights)"),
    (r"median|kthvalue", "x.sort(stable=True), and the value at the place in question"),
    (r"grid_sampler", "weighted sums of neighbours that are looked up by gather()"),
    (r"cumsum", "a product with a triangular matrix: x @ torch.ones(n, n).triu()"),
)
"""By torch's names of kernels that add in whichever order their threads come, as `torch.use_deterministic_algorithms`
lists them: what computes the same, or the like, and repeats."""
_HINTS: tuple[tuple[str, str | Callable[[re.Match[str], Share | None], str]], ...] = (
    (OUT_OF_MEMORY, _too_large),
    (r"Expected more than 1 value per channel when training", _lonely_sample),
    (r"(.*) does not have a deterministic implementation", _cannot_repeat),
    (
        r"dtype, but got Double and Float|Input type \(double\) and (bias|weight) type \(float\)",
        "NumPy's numbers are float64 and a model's weights float32: convert the data, as with .float().",
    ),
    (
        r"dtype, but got (Long|Int|Byte|Bool) and Float|Input type \((long|int|unsigned char|bool)\) and",
        "A layer computes with floats: convert its input, as with .float().",
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long but found",
        "Targets of this loss are classes, whole numbers of 64 bits: convert them, as with .long().",
    ),
    (r"Target (\d+) is out of bounds", _class_out_of_bounds),
    (
        r"fail_on_recompile_limit_hit",
        "What is compiled is recompiled for each shape of a batch, and each number of the host that loss() or the "
        "model computes with. Pad batches to a few shapes, give numbers as tensors, or set `compile: false`.",
    ),
    (
        r"got mixed torch.Tensor and DTensor",
        "With strategy: fsdp weights are whole only while the model or one of its units is called: have loss() and "
        "metrics() call the model itself, and move what they do with its other modules and parameters into forward().",
    ),
    (r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", _layer_that_does_not_fit),
    (
        r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)",
        "This loss takes a row of scores for each target: see that neither is flattened with another dimension.",
    ),
    (
        r"must be Tensor, not (list|str)",
        "Text comes as a list: turn it into numbers in the dataset, or in collate(), such as by a tokenizer. Of a "
        "model's output or a dict take the tensor, such as output.logits.",
    ),
    (
        r"must be Tensor, not|'(dict|list|tuple)' object has no attribute '(size|shape|dim|device|to|float|backward)'",
        'Take the tensor out of what is given here, such as output.logits of a model\'s output, or batch["labels"].',
    ),
    (
        r"modified by an inplace operation|in-place operation",
        "Write `x = x + 1` instead of `x += 1`, and leave out relu_() and `inplace=True` there: the gradient "
        "needs the value that is written over.",
    ),
    (
        r"(too many|not enough) values to unpack",
        "Where this is a batch: it has the parts of a sample of datasets(), in their order.",
    ),
    (
        r"backward through the graph a second time",
        "Compute what the loss depends on again in each call of loss(), or .detach() what is kept. Leave "
        "out loss.backward(): Quorate calls it.",
    ),
    (
        r"\.log\(\) got an unexpected keyword argument '(\w+)'",
        lambda found, _: (
            f"Leave {found[1]} out: self.log(name, value) is all there is. The progress line and trackers "
            "show, of each step, the mean over the samples of its batch."
        ),
    ),
)
