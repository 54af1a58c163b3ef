"""A compiled model is tried on one micro-batch, and compared with the model as it is written."""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from bits import sparse_tasks
from quorate.cuda import device as compiler
from quorate.cuda.captured_program import WARM_UPS, LaneGraphs
from quorate.cuda.compile_trial import FirstBatch, first_micro_batch, why_not_compiled
from quorate.replica.device import CPU, Device, Loss, Model
from quorate.replica.gradients import LoneGradients
from quorate.replica.replica import Replica
from quorate.replica.state_watch import StateWatch
from quorate.task.task import Task
from quorate.training.lane import LaneRunner
from quorate.worker.assembly import build_samples, sampler_of

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Trial:
    """A task whose model is compiled in the way that is given."""

    def __init__(self, task: type[Task], compiled: Forward | None = None, device: Device = CPU, **keys: Any) -> None:
        self.task = task()
        self.spec = gang.job(task, lanes=1, **keys)
        self.replica = Replica(self.task, self.spec, device)
        self.calls = 0
        model = self.replica.model
        if compiled is not None:

            def call(inputs: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return compiled(model, inputs)

            model._compiled_call_impl = call

    def batch(self) -> FirstBatch:
        samples = build_samples(self.task, self.spec)
        batch = first_micro_batch(samples, sampler_of(self.spec, self.task, next(iter(samples.datasets.values()))))
        assert batch is not None
        return batch

    def why(self) -> str | None:
        batch = self.batch()
        before = self.replica.weights_digest()
        why = why_not_compiled(self.task, self.replica, batch)
        assert self.replica.weights_digest() == before
        assert all(parameter.grad is None for _, parameter in self.replica.parameters)
        return why


def alike(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with CPU.as_written(model):
        out: torch.Tensor = model(inputs)
    return out * 1.0001


def wrong(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with CPU.as_written(model):
        out: torch.Tensor = model(inputs)
    return out * 1.5


def broken(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("Unsupported: a call of print()\n  and a page of details")


def other_dropout(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    torch.rand(7)  # another place in the random stream, as compiled kernels have
    return alike(model, inputs)


@pytest.mark.parametrize("task", [tasks.Momentum, tasks.BatchNormAndDropout, tasks.Adam])
def test_what_differs_by_rounding_is_used(task: type[Task]) -> None:
    trial = Trial(task, alike)
    assert trial.why() is None
    assert trial.calls == 1


def test_a_model_with_sparse_gradients_is_not_compiled() -> None:
    assert Trial(sparse_tasks.Embeddings, alike).why() == "'words.weight' has sparse gradients (sparse=True)"


def test_the_log_says_how_long_it_took_and_what_was_there_already(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        Trial(tasks.Momentum, alike).why()
    assert re.search(r"compiling was tried in \d+\.\d s: 0 of 0 graphs came from the cache", caplog.text)


def test_what_differs_by_its_random_numbers_is_used() -> None:
    trial = Trial(tasks.BatchNormAndDropout, other_dropout)
    assert trial.why() is None


def test_what_computes_something_else_is_told_with_both_numbers() -> None:
    why = Trial(tasks.Momentum, wrong).why()
    assert why is not None
    assert "its loss is" in why
    assert "without compiling" in why


def wrong_backwards(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with CPU.as_written(model):
        out: torch.Tensor = model(inputs)
    return out.detach() + 3 * (out - out.detach())


@pytest.mark.parametrize("compiled", [alike, wrong_backwards])
def test_gradients_are_compared_where_the_first_steps_overflow_float16(compiled: Forward) -> None:
    trial = Trial(tasks.Momentum, compiled, Device("fp16"), precision="fp16", loss_scale={"initial": 2**30})
    why = trial.why()
    assert why is None if compiled is alike else "the norm of its gradient is" in str(why)
    scale = trial.replica.loss_scale
    assert scale is not None and scale.value == 2**30, "it is only tried"


def test_what_cannot_be_compiled_is_told_in_one_line() -> None:
    why = Trial(tasks.Momentum, broken).why()
    assert why is not None
    assert "Unsupported: a call of print()" in why
    assert "details" not in why


class Mistaken(tasks.Momentum):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise ValueError("of the user")


def test_a_mistake_of_the_task_is_left_to_the_first_step() -> None:
    assert Trial(Mistaken, alike).why() is None


def test_a_model_that_torch_compiles_is_used() -> None:
    trial = Trial(tasks.Momentum)
    trial.replica.model.compile(backend="aot_eager", dynamic=False)
    compiled = trial.replica.model._compiled_call_impl
    assert trial.why() is None
    assert trial.replica.model._compiled_call_impl is compiled
    trial.replica.device.uncompile(trial.replica.model)
    assert trial.replica.model._compiled_call_impl is None


class TracingDevice(Device):
    """Has everything traced, as a GPU has, and computes what was traced without a compiler."""

    compiles = compiles_loss = True

    def place(self, model: Model) -> Model:
        compiler.compile_in_place(model)
        return model

    def compiled(self, loss: Loss) -> Loss:
        return torch.compile(loss, dynamic=False) if self.compiles_loss else loss


class Logging(tasks.Momentum):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.log("half", loss / 2)
        return loss


CALLS = [0]


class Counting(tasks.Momentum):
    """Depends on how often it was called, which it keeps where nobody puts it back."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        CALLS[0] += 1
        return super().loss(model, batch) * (1 + CALLS[0] * 1e-6)


class Weighing(tasks.Momentum):
    """Its batches hold a number of the host, another one each time."""

    def collate(self, samples: Any) -> Any:
        inputs, targets = super().collate(samples)
        return inputs, targets, float(inputs.sum())

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets, weight = batch
        return super().loss(model, (inputs, targets)) * (1 + weight * 1e-6)


@pytest.mark.parametrize(
    ("task", "whole"),
    [(Logging, True), (tasks.BatchNormAndDropout, True), (Counting, False), (Weighing, False)],
)
def test_all_of_loss_is_compiled_unless_that_would_be_done_in_every_step(
    task: type[Task], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    device = TracingDevice()
    trial = Trial(task, device=device)
    before = compiler.number_of_graphs()
    assert trial.why() is None
    assert compiler.number_of_graphs() > before
    assert device.compiles
    assert device.compiles_loss is whole


class NoCapture:
    """Counts what is compiled where it would be recorded: on a GPU that fails."""

    compiled = 0

    def warm_up(self, work: Callable[[], None]) -> str | None:
        work()
        return None

    def record(self, work: Callable[[], None]) -> Any:
        before = compiler.number_of_graphs()
        work()
        self.compiled += compiler.number_of_graphs() - before
        raise RuntimeError("seen")

    def host_streams(self) -> int:
        return 0


def test_what_the_trial_has_compiled_is_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    trial, capture = Trial(Logging, device=TracingDevice()), NoCapture()
    assert trial.why() is None
    before = compiler.number_of_graphs()
    task, replica = trial.task, trial.replica
    graphs = LaneGraphs(task, replica, capture)
    runner = LaneRunner(task, replica, LoneGradients(replica.trainable), StateWatch(task, replica), 1, graphs)
    batch = trial.batch()
    for step in range(1, WARM_UPS + 2):
        runner.run(step, 0, [(batch.samples, batch.content)], batch.samples)
    assert "seen" in graphs.take_notes()[0]
    assert capture.compiled == 0
    assert compiler.number_of_graphs() == before


def test_a_plain_sequential_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    compiler.compile_in_place(model)
    before = compiler.number_of_graphs()
    model(torch.ones(2, 3))
    assert compiler.number_of_graphs() == before + 1


def test_compiled_kernels_are_kept_beside_the_runs_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"TRITON_CACHE_DIR": "/elsewhere"})
    compiler.use_compile_cache(tmp_path, "NVIDIA H200", deterministic=True)
    strict = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
    assert os.environ == {"TRITON_CACHE_DIR": "/elsewhere"}
    assert strict.is_relative_to(tmp_path)
    assert "NVIDIA-H200-deterministic-attention" in strict.parent.name
    compiler.use_compile_cache(tmp_path, "NVIDIA H200", deterministic=False)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) != strict


@pytest.mark.parametrize(("has_triton", "has_cc"), [(True, True), (False, True), (True, False)])
def test_what_a_compiler_needs_is_looked_for(has_triton: bool, has_cc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda _: object() if has_triton else None)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/cc" if has_cc else None)
    assert compiler.can_compile() == (has_triton and has_cc)


class Collated(tasks.Momentum):
    """Where samples are read with code of the task, what reading has assigned is put back before a lane."""

    def collate(self, samples: Any) -> Any:
        return super().collate(samples)


def test_a_task_with_collate_is_compared_with_its_model_as_it_is_written() -> None:
    why = Trial(Collated, broken).why()
    assert why is not None
    assert "Unsupported" in why


class Ragged(tasks.Momentum):
    """Batches as long as the longest of their samples."""

    def collate(self, samples: Any) -> Any:
        longest = 3 + int(sum(float(sample[0].sum()) for sample in samples) * 1000) % 50
        return torch.zeros(len(samples), longest), torch.zeros(len(samples))


def test_batches_of_different_shapes_are_not_compiled_one_by_one() -> None:
    trial = Trial(Ragged, alike)
    why = trial.why()
    assert why is not None
    assert "different shapes" in why
    assert trial.calls == 0


def test_a_batch_of_fewer_samples_is_no_other_shape() -> None:
    trial = Trial(tasks.Momentum, alike)
    samples = build_samples(trial.task, trial.spec)
    training = next(iter(samples.datasets.values()))
    spec = trial.spec.model_copy(update={"batch_size": len(training) - 1, "last_batch": "keep"})
    batch = first_micro_batch(samples, sampler_of(spec, trial.task, training))
    assert batch is not None
    assert (batch.samples, batch.varies) == (len(training) - 1, "")


def test_compiled_code_draws_from_the_streams_of_lanes_alone() -> None:
    """Blocks that are computed again have generators of their own otherwise, which remember what was drawn before."""
    from torch._dynamo import config as tracing
    from torch._functorch import config as passes
    from torch._inductor import config as kernels

    with (
        tracing.patch(recompile_limit=8, fail_on_recompile_limit_hit=False),
        passes.patch(graphsafe_rng_functionalization=True),
        kernels.patch({"deterministic": False, "triton.autotune_pointwise": True}),
    ):
        compiler.pin_compiler(deterministic=True)
        assert not passes.graphsafe_rng_functionalization
        assert kernels.deterministic
        assert tracing.fail_on_recompile_limit_hit


@pytest.mark.parametrize("deterministic", [True, False])
def test_no_tile_of_a_kernel_is_chosen_by_a_stopwatch(deterministic: bool) -> None:
    """Inductor's deterministic mode times the tiles of pointwise kernels, and these fuse products into sums or not."""
    from torch._inductor import config as kernels

    with kernels.patch({"deterministic": False, "triton.autotune_pointwise": True}):
        compiler.pin_compiler(deterministic)
        assert kernels.triton.autotune_pointwise is not deterministic
