"""Training loops as people write them: those that keep the promise, and those that are refused, each with its words.

More that keep it are the patterns of docs/how-to/own-loop-patterns.md."""

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from quorate.own_loop.run import Run

Main = Callable[..., Any]
INPUTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(INPUTS, INPUTS.sum(1))
OTHER = TensorDataset(-INPUTS, INPUTS.sum(1))
EQUAL: list[Main] = []
REFUSED: dict[Main, str] = {}


def equal(main: Main) -> Main:
    EQUAL.append(main)
    return main


def refused(words: str) -> Callable[[Main], Main]:
    def note(main: Main) -> Main:
        REFUSED[main] = words
        return main

    return note


class Net(nn.Module):
    """A little of everything that a loop may want to change."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.drop, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1)
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.drop(torch.tanh(self.bn(self.first(inputs)) / self.temperature))
        return self.head(hidden).squeeze(-1) * self.scale


def prepared(run: Run, momentum: float = 0.9) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    model, optimizer = run.prepare(model, optimizer)
    return model, optimizer


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(run: Run, model: nn.Module, after: Callable[[Any], Any] = lambda _: None) -> None:
    for batch in run.batches(DATA):
        result = run.step(loss_of(model, batch))
        if result is not None:
            after(result)


@equal
def plain(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        train(run, model)


@equal
def without_epochs(run: Run) -> None:
    model, _ = prepared(run)
    train(run, model)


@equal
def rate_halved_at_the_top_of_an_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in run.epochs():
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        train(run, model)


@equal
def rate_halved_after_an_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in run.epochs():
        train(run, model)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


@equal
def rate_of_a_table(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        optimizer.param_groups[0]["lr"] = [0.1, 0.01, 0.001][epoch]
        train(run, model)


@equal
def momentum_and_decay_by_the_step(run: Run) -> None:
    model, optimizer = prepared(run)

    def change(result: Any) -> None:
        optimizer.param_groups[0] |= {"momentum": 0.5 + 0.01 * result.step, "weight_decay": 0.001 * result.step}

    for _ in run.epochs():
        train(run, model, change)


@equal
def plateau_by_hand(run: Run) -> None:
    model, optimizer = prepared(run)
    run.evaluate(DATA, lambda batch: {"loss": loss_of(model, batch)})
    run.state["best"] = 1e9
    for _ in run.epochs():
        train(run, model)
        if run.metrics["loss"] > run.state["best"] * 0.1:
            optimizer.param_groups[0]["lr"] *= 0.1
        run.state["best"] = min(run.state["best"], run.metrics["loss"])


@equal
def cycle_over_all_steps(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = run.batches(DATA)
    assert run.total_steps == 3 * len(batches) == 3 * run.steps_per_epoch == 12
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    for epoch in run.epochs():
        assert run.epoch == epoch
        for batch in batches:
            run.step(loss_of(model, batch))


@equal
def temperature_by_the_step(run: Run) -> None:
    model, _ = prepared(run)

    def cool(_: Any) -> None:
        model.temperature *= 0.95

    for _ in run.epochs():
        train(run, model, cool)


@equal
def temperature_by_the_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        model.temperature = 2.0 - epoch / 2
        train(run, model)


@equal
def dropout_by_the_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        model.drop.p = 0.1 * epoch
        train(run, model)


@equal
def frozen_statistics(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        if epoch >= 1:
            model.bn.eval()
        train(run, model)


@equal
def evaluated_by_hand(run: Run) -> None:
    model, optimizer = prepared(run)
    run.state["best"] = 1e9
    for _ in run.epochs():
        model.train()
        train(run, model)
        model.eval()
        with torch.no_grad():
            found = float(loss_of(model, DATA[:]))
        if found > run.state["best"] * 0.1:
            optimizer.param_groups[0]["lr"] *= 0.5
        run.state["best"] = min(found, run.state["best"])


@equal
def buffer_filled_by_the_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        model.scale.fill_(1 + epoch)
        train(run, model)


@equal
def average_in_a_local(run: Run) -> None:
    model, _ = prepared(run)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in run.epochs():
        train(run, model, lambda _: averaged.update_parameters(model))


@equal
def statistics_gathered_after_an_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        train(run, model)
        with torch.no_grad():
            model(INPUTS)


@equal
def mask_of_an_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        mask = (torch.rand(4) < 0.7).float()
        for inputs, targets in run.batches(DATA):
            run.step(F.mse_loss(model(inputs * mask), targets))


@equal
def mask_of_an_epoch_by_numpy_and_python(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        mask = torch.tensor(numpy.random.rand(4), dtype=torch.float32)
        sign = random.choice([-1, 1])
        for inputs, targets in run.batches(DATA):
            run.step(F.mse_loss(model(inputs * mask * sign), targets))


@equal
def draws_after_a_step(run: Run) -> None:
    model, optimizer = prepared(run)

    def jitter(_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + random.random())

    for _ in run.epochs():
        train(run, model, jitter)


@equal
def mixup(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            share, order = numpy.random.beta(0.4, 0.4), torch.randperm(len(inputs))
            mixed = share * inputs + (1 - share) * inputs[order]
            run.step(F.mse_loss(model(mixed), share * targets + (1 - share) * targets[order]))


@equal
def two_optimizers(run: Run) -> None:
    model = nn.ModuleDict({"d": nn.Linear(4, 1), "g": nn.Linear(4, 4)})
    made = {name: torch.optim.Adam(part.parameters(), lr=0.01) for name, part in model.items()}
    model, optimizers = run.prepare(model, made)
    for _ in run.epochs():
        for inputs, _ in run.batches(DATA):
            fake = model["g"](torch.randn(len(inputs), 4))
            real, made_up = model["d"](inputs), model["d"](fake.detach())
            run.step(
                {"d": F.softplus(-real).mean() + F.softplus(made_up).mean(), "g": F.softplus(-model["d"](fake)).mean()}
            )
        optimizers["g"].param_groups[0]["lr"] *= 0.9


@equal
def totals_for_the_log(run: Run) -> None:
    model, _ = prepared(run)
    seen, history = 0, []
    for epoch in run.epochs():
        total = 0.0
        for batch in run.batches(DATA):
            loss = loss_of(model, batch)
            result = run.step(loss)
            total += loss.item()
            seen += len(batch[0])
            if result is not None:
                history.append(result.loss)
        if run.is_main:
            print(epoch, total, seen, len(history))


class Trainer:
    """A loop in a class, as many keep it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model, self.optimizer = prepared(run)
        self.epoch = 0

    def fit(self) -> None:
        for epoch in self.run.epochs():
            self.epoch = epoch
            self.optimizer.param_groups[0]["lr"] = 0.05 / (1 + self.epoch)
            self.fit_epoch()

    def fit_epoch(self) -> None:
        for batch in self.run.batches(DATA):
            self.run.step(loss_of(self.model, batch) / (1 + self.epoch))


@equal
def in_a_class(run: Run) -> None:
    Trainer(run).fit()


@equal
def dataset_made_anew_for_each_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        for batch in run.batches(TensorDataset(INPUTS, INPUTS.sum(1)), collate=lambda samples: _stacked(samples)):
            run.step(loss_of(model, batch))


def _stacked(samples: Any) -> Any:
    return [torch.stack(column) for column in zip(*samples, strict=True)]


@equal
def initialised_after_prepare(run: Run) -> None:
    model, _ = prepared(run)
    nn.init.zeros_(model.head.weight)
    model.first.weight.data.mul_(0.5)
    train(run, model)


@equal
def reference_of_the_initial_weights(run: Run) -> None:
    model, _ = prepared(run)
    reference = copy.deepcopy(model).eval()
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            with torch.no_grad():
                expected = reference(inputs)
            outputs = model(inputs)
            run.step(F.mse_loss(outputs, targets) + 0.1 * F.mse_loss(outputs, expected))


@equal
def rate_read_before_the_loop(run: Run) -> None:
    model, optimizer = prepared(run)
    base = optimizer.param_groups[0]["lr"]
    for epoch in run.epochs():
        optimizer.param_groups[0]["lr"] = base * 0.5**epoch
        train(run, model)


@equal
def gradient_hook_after_prepare(run: Run) -> None:
    model, _ = prepared(run)
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    for _ in run.epochs():
        train(run, model)


@equal
def layer_and_hook_kept_from_before(run: Run) -> None:
    model, seen = Net(), dict[str, torch.Tensor]()
    model.first.register_forward_hook(lambda _, inputs, output: seen.update(hidden=output))
    layer = model.first
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.prepare(model, optimizer)
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            loss = F.mse_loss(model(inputs), targets)
            run.step(loss + 0.01 * seen["hidden"].abs().mean() + 0.01 * layer.weight.square().sum())


@equal
def momentum_forgotten_at_the_top_of_an_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in run.epochs():
        optimizer.state.clear()
        train(run, model)


@refused("These variables differ: scheduler.")
def scheduler_in_a_local(run: Run) -> None:
    model, optimizer = prepared(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    for _ in run.epochs():
        train(run, model, lambda _: scheduler.step())


@refused("These variables differ: count")
def steps_counted_in_a_local(run: Run) -> None:
    model, optimizer = prepared(run)
    count = 0
    for _ in run.epochs():
        for batch in run.batches(DATA):
            if run.step(loss_of(model, batch)) is not None:
                count += 1
                optimizer.param_groups[0]["lr"] = 0.05 / (1 + count)


@refused("it sets optimizer.param_groups[0]['lr'] to 0.05, and not to")
def batches_counted_by_enumerate(run: Run) -> None:
    model, optimizer = prepared(run)
    for _ in run.epochs():
        for number, batch in enumerate(run.batches(DATA)):
            if run.step(loss_of(model, batch)) is not None:
                optimizer.param_groups[0]["lr"] = 0.05 * 0.99**number


@refused("These variables differ: teacher")
def teacher_in_a_local(run: Run) -> None:
    model, _ = prepared(run)
    teacher = copy.deepcopy(model)

    def follow(_: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            outputs = model(inputs)
            loss = F.mse_loss(outputs, targets) + F.mse_loss(outputs, teacher.eval()(inputs).detach())
            if run.step(loss) is not None:
                follow(None)


@refused("These variables differ: centre")
def centre_of_the_first_batch(run: Run) -> None:
    model, _ = prepared(run)
    centre = None
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            centre = inputs.mean(0) if centre is None else centre
            run.step(F.mse_loss(model(inputs - centre), targets))


@refused("These variables differ: old")
def policy_of_the_top_of_an_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        old = copy.deepcopy(model).eval()
        for inputs, targets in run.batches(DATA):
            outputs = model(inputs)
            run.step(F.mse_loss(outputs, targets) + F.mse_loss(outputs, old(inputs).detach()))


@refused("These variables differ: plateau")
def plateau_in_a_local(run: Run) -> None:
    model, optimizer = prepared(run)
    run.evaluate(DATA, lambda batch: {"loss": loss_of(model, batch)})
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
    for _ in run.epochs():
        train(run, model)
        plateau.step(run.metrics["loss"])


class Config:
    """Settings of a script, for all to see."""

    smoothing = 0.1


@refused("gives another loss or gradient for the same batch. These variables differ: Config")
def config_for_all_to_see(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            run.step(F.mse_loss(model(inputs), targets * (1 - Config.smoothing)))
        Config.smoothing *= 0.5


@refused("keeps tensors that change in training in averaged, where no checkpoint has them")
def evaluated_with_an_average_in_a_local(run: Run) -> None:
    model, _ = prepared(run)
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()}

    def measure(batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(torch.func.functional_call(model, averaged, batch[0]), batch[1])}

    def average(_: Any) -> None:
        for name, parameter in model.named_parameters():
            averaged[name].lerp_(parameter.detach(), 0.1)

    run.evaluate(DATA, measure)
    for _ in run.epochs():
        train(run, model, average)


@refused("has changed weights after the last step")
def best_weights_loaded_at_the_end(run: Run) -> None:
    model, _ = prepared(run)
    best = copy.deepcopy(model.state_dict())
    for _ in run.epochs():
        train(run, model)
    model.load_state_dict(best)


@refused("run.step() was called inside torch.autocast()")
def step_inside_autocast(run: Run) -> None:
    model, _ = prepared(run)
    for batch in run.batches(DATA):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.step(loss_of(model, batch))


@refused("was called inside torch.autocast()")
def all_inside_autocast(run: Run) -> None:
    model, _ = prepared(run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(run, model)


@refused("run.step() was called inside hooks of saved tensors")
def step_inside_hooks(run: Run) -> None:
    model, _ = prepared(run)
    for batch in run.batches(DATA):
        with torch.autograd.graph.save_on_cpu():
            run.step(loss_of(model, batch))


@refused("These have changed meanwhile: baseline")
def baseline_carried(run: Run) -> None:
    model, _ = prepared(run)
    baseline = 0.0
    for batch in run.batches(DATA):
        loss = loss_of(model, batch)
        run.step((loss - baseline) ** 2)
        baseline = 0.9 * baseline + 0.1 * loss.item()


@refused("These have changed meanwhile: queue")
def queue_carried(run: Run) -> None:
    model, _ = prepared(run)
    queue: list[torch.Tensor] = []
    for inputs, targets in run.batches(DATA):
        outputs = model(inputs)
        penalty = sum(outputs.mean() * old for old in queue)
        run.step(F.mse_loss(outputs, targets) + 0.1 * penalty)
        queue.append(outputs.mean().detach())


@refused("loss or gradient was another one")
def hidden_state_carried(run: Run) -> None:
    cell, head = nn.GRUCell(4, 5), nn.Linear(5, 1)
    model = nn.ModuleDict({"cell": cell, "head": head})
    model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    hidden = torch.zeros(1, 5)
    for inputs, targets in run.batches(DATA):
        states = model["cell"](inputs, hidden.expand(len(inputs), 5))
        run.step(F.mse_loss(model["head"](states).squeeze(-1), targets))
        hidden = states.detach().mean(0, keepdim=True)


@refused("param_groups[0]['lr'] was changed from 0.05")
def rate_changed_for_each_batch(run: Run) -> None:
    model, optimizer = prepared(run)
    for batch in run.batches(DATA):
        run.step(loss_of(model, batch))
        optimizer.param_groups[0]["lr"] *= 0.99


@refused("has changed 'd.weight' itself")
def step_left_over(run: Run) -> None:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    made = {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in model.items()}
    model, optimizers = run.prepare(model, made)
    for inputs, _ in run.batches(DATA):
        value = model["d"](model["g"](inputs)).mean()
        if run.step({"g": value, "d": value}) is not None:
            model["d"].weight.grad = torch.ones_like(model["d"].weight)
            optimizers["d"].step()


@refused("has changed 'first.weight' itself")
def weights_clamped(run: Run) -> None:
    model, _ = prepared(run)

    def clamp(_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    train(run, model, clamp)


@refused("requires_grad of 'first.weight' was changed to False")
def frozen_late(run: Run) -> None:
    model, _ = prepared(run)
    train(run, model, lambda _: model.first.requires_grad_(False))


@refused("other parameters between two steps")
def parameters_added_late(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05)
    model.bn.requires_grad_(False)
    model.head.requires_grad_(False)
    model, optimizer = run.prepare(model, optimizer)
    train(run, model, lambda _: optimizer.add_param_group({"params": model.head.parameters()}))


@refused("'model.history' was changed in list_in_the_model() between two steps, to a list")
def list_in_the_model(run: Run) -> None:
    model, _ = prepared(run)

    def note(result: Any) -> None:
        model.history = [result.loss]  # type: ignore[assignment]

    train(run, model, note)


@refused("the hooks of first were changed in hook_added_late()")
def hook_added_late(run: Run) -> None:
    model, _ = prepared(run)
    train(run, model, lambda _: model.first.register_forward_hook(lambda *_: None))


@refused("run.state was changed in measure()")
def state_changed_in_measure(run: Run) -> None:
    model, _ = prepared(run)
    run.state["seen"] = 0

    def measure(batch: Any) -> dict[str, Any]:
        run.state["seen"] += 1
        return {"loss": loss_of(model, batch)}

    run.evaluate(DATA, measure)
    for _ in run.epochs():
        train(run, model)


@refused("was given 48 samples at first, and now another dataset of 48")
def second_dataset(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        for batch in run.batches(OTHER if epoch else DATA):
            run.step(loss_of(model, batch))


@refused("was given another `collate` than at first")
def second_collate(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        for batch in run.batches(DATA, collate=_stacked if epoch else (lambda samples: _stacked(samples[::-1]))):
            run.step(loss_of(model, batch))


@refused("was given batch_size=None at first, and now 8")
def second_batch_size(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():
        for batch in run.batches(DATA, 8 if epoch else None):
            run.step(loss_of(model, batch))


class Noisy(TensorDataset):
    """As many are written: what it gives depends on an epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index] + 0.1 * self.epoch, self.tensors[1][index]


@refused("'epoch' of the dataset was changed between two steps")
def dataset_told_the_epoch(run: Run) -> None:
    model, _ = prepared(run)
    data = Noisy(*DATA.tensors)
    for epoch in run.epochs():
        data.set_epoch(epoch)
        for batch in run.batches(data):
            run.step(loss_of(model, batch))


SCALE = 1.0
SEEN: dict[str, torch.Tensor] = {}
NET: Any = None
SHOWN = 0


@refused("These variables differ: SCALE")
def global_set_by_the_step(run: Run) -> None:
    global SCALE
    model, _ = prepared(run)
    for _ in run.epochs():
        for batch in run.batches(DATA):
            result = run.step(SCALE * loss_of(model, batch))
            if result is not None:
                SCALE = 0.9**result.step


@refused("These variables differ: SEEN")
def normalised_by_a_global_first_batch(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            SEEN.setdefault("mean", inputs.mean(0))
            run.step(F.mse_loss(model(inputs - SEEN["mean"]), targets))


@refused("gives another loss or gradient")
def environment_variable(run: Run) -> None:
    model, _ = prepared(run)
    for _ in run.epochs():
        for batch in run.batches(DATA):
            result = run.step(float(os.environ.get("LOSS_WEIGHT", "1")) * loss_of(model, batch))
            if result is not None:
                os.environ["LOSS_WEIGHT"] = str(0.9**result.step)


@equal
def model_in_a_global(run: Run) -> None:
    global NET
    NET, optimizer = prepared(run)
    for _ in run.epochs():
        train(run, NET, lambda result: optimizer.param_groups[0].update(lr=0.05 / (1 + result.step)))


@equal
def global_count_for_the_log(run: Run) -> None:
    global SHOWN
    model, _ = prepared(run)
    for _ in run.epochs():
        for batch in run.batches(DATA):
            SHOWN += 1
            run.log("shown", float(SHOWN >= 0))
            run.step(loss_of(model, batch))


@equal
def numbers_of_numpy(run: Run) -> None:
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        model.temperature = numpy.cos(0.1 * epoch)
        optimizer.param_groups[0]["lr"] = numpy.float64(0.05) / (1 + epoch)
        train(run, model)


@equal
def bank_written_after_the_step(run: Run) -> None:
    """In place: by then the backward pass of the batch is done."""
    model, _ = prepared(run)
    bank = torch.zeros(4)
    for _ in run.epochs():
        for inputs, targets in run.batches(DATA):
            bank.zero_().add_(inputs.mean(0))
            run.step(F.mse_loss(model(inputs * (1 + bank)), targets))
            bank.zero_()


@refused("makes another 'scale'")
def average_warmed_up_by_a_local(run: Run) -> None:
    model, _ = prepared(run)
    count = 0
    for _ in run.epochs():
        for batch in run.batches(DATA):
            result = run.step(loss_of(model, batch))
            if result is not None:
                count += 1
                model.scale.lerp_(torch.full((1,), 2.0), 1 / (1 + count))


@refused("its schedule sets")
def rate_by_a_function_of_a_local(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    factor = [1.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor[0])
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    for _ in run.epochs():
        train(run, model, lambda result: factor.__setitem__(0, factor[0] * 0.9))


class CountingSGD(torch.optim.SGD):
    """As many are written: it counts its steps where no state_dict() looks."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.param_groups[0]["lr"] = 0.05 / self.count
        return super().step(closure)


@refused("'self.count' of the optimizer was changed in")
def optimizer_that_counts(run: Run) -> None:
    model = Net()
    optimizer = CountingSGD(model.parameters(), lr=0.05)
    optimizer.count = 0
    model, _ = run.prepare(model, optimizer)
    for _ in run.epochs():
        train(run, model)


@refused("was given another `collate` than at first")
def collate_of_the_epoch(run: Run) -> None:
    model, _ = prepared(run)
    for epoch in run.epochs():

        def collate(samples: Any, epoch: int = epoch) -> Any:
            return pair_of(samples, 1 + epoch)

        for batch in run.batches(DATA, collate=collate):
            run.step(loss_of(model, batch))


def pair_of(samples: Any, factor: float) -> Any:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs) * factor, torch.stack(targets)


@refused("'tensors' of the dataset was changed between two steps")
def labels_corrected_between_epochs(run: Run) -> None:
    model, _ = prepared(run)
    data = TensorDataset(INPUTS, INPUTS.sum(1).clone())
    for _ in run.epochs():
        for batch in run.batches(data):
            run.step(loss_of(model, batch))
        data.tensors[1].mul_(0.9)


@refused("The dataset has other samples each time that it is made")
def dataset_without_a_seed(run: Run) -> None:
    model, _ = prepared(run)
    noise = torch.from_numpy(numpy.random.default_rng().normal(size=INPUTS.shape)).float()
    data = TensorDataset(INPUTS + noise, INPUTS.sum(1))
    for _ in run.epochs():
        for batch in run.batches(data):
            run.step(loss_of(model, batch))


@refused("it fails: UnboundLocalError: cannot access local variable 'result'")
def result_after_the_batches(run: Run) -> None:
    """A worker that joins just there, or a job that was stopped there, has seen no batch of the epoch."""
    model, optimizer = prepared(run)
    for _ in run.epochs():
        for batch in run.batches(DATA):
            result = run.step(loss_of(model, batch))
        assert result is not None
        assert result.loss is not None
        optimizer.param_groups[0]["lr"] *= 0.5 if result.loss > 1 else 1


class SlowSGD(torch.optim.SGD):
    """Keeps slow weights in a list."""

    slow: list[torch.Tensor]

    def step(self, closure: Any = None) -> Any:
        loss, trained = super().step(closure), self.param_groups[0]["params"]
        for slow, one in zip(self.slow, trained, strict=True):
            one.data.copy_(slow.lerp_(one.data, 0.5))
        return loss


@refused("'self.slow' of the optimizer was changed in")
def slow_weights_in_a_list(run: Run) -> None:
    model = Net()
    optimizer = SlowSGD(model.parameters(), lr=0.05)
    optimizer.slow = [each.detach().clone() for each in model.parameters()]
    model, _ = run.prepare(model, optimizer)
    for _ in run.epochs():
        train(run, model)


@refused("'count' of the optimizer was changed in")
def hook_that_counts(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    count = 0

    def clamp(*_: Any) -> None:
        nonlocal count
        count += 1
        if count % 7 == 0:
            with torch.no_grad():
                for each in model.parameters():
                    each.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    model, _ = run.prepare(model, optimizer)
    for _ in run.epochs():
        train(run, model)
