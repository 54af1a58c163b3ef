"""The settings of optimizers are committed state: nobody but an update changes them, and all workers have the same."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import gang
from bits import bit_tasks as tasks
from quorate.core.errors import RunError, UnsupportedModelError, UserCodeError
from quorate.own_loop.loop import own_loop_of
from quorate.own_loop.run import Run
from quorate.replica.gradients import LoneGradients
from quorate.replica.optimizer_state import load_settings, load_state
from quorate.replica.replica import Replica
from quorate.replica.settings import IN_TURN, Settings
from quorate.replica.state_watch import StateWatch
from quorate.task.run_mode import RunMode
from quorate.task.task import Task
from quorate.training.lane import LaneRunner
from quorate.training.loop import Loop
from training.recorded import run

Act = Callable[[Any], object]


class Wraps(torch.optim.Optimizer):
    """As Lookahead or SAM do."""

    def __init__(self, base: torch.optim.Optimizer, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Tunable(torch.optim.SGD):
    """An optimizer with something of its own, which acts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.power, self.table = 2, {"a": [1.0]}
        self.mask, self.shape = torch.zeros(3), max
        self.seen, self.deep = {1}, ({"b": torch.ones(2)},)
        for group in self.param_groups:
            group["band"] = [0.1, 0.2]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["momentum"] *= 0.99
            group["band"][0] *= 0.5
        return super().step(closure)


class Keeps(tasks.Regression):
    """Has its optimizer and its schedule at hand."""

    def optimizer(self, model: nn.Module) -> Any:
        self.opt: Any = Tunable(model.parameters())
        return self.opt

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler
        parts: list[Any] = [scheduler.LinearLR(optimizer), scheduler.StepLR(optimizer, 3)]
        self.sched: Any = scheduler.SequentialLR(optimizer, parts, [4])
        return self.sched


class ByTensor(Keeps):
    def optimizer(self, model: nn.Module) -> Any:
        betas: Any = torch.tensor(0.9), torch.tensor(0.99)
        self.opt = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
        return self.opt


class Wrapped(Keeps):
    def optimizer(self, model: nn.Module) -> Any:
        self.opt = Wraps(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.parameters())
        return self.opt


def trained(task: Any, spec: Any = None) -> Replica:
    replica = Replica(task, spec or gang.job(Keeps))
    for _, parameter in replica.parameters:
        parameter.grad = torch.ones_like(parameter)
    replica.optimizers.update()
    return replica


class Watched:
    """Lanes that do as they are told."""

    def __init__(self, task: type[Task] = Keeps) -> None:
        self.task: Any = task()
        self.replica = trained(self.task)
        self.watch = StateWatch(self.task, self.replica)

    def lane(self, act: Act) -> None:
        self.watch.before_lane()
        act(self.task)
        self.watch.after_lane()

    def step(self, act: Act) -> None:
        self.watch.settings.begin()
        self.lane(lambda _: None)
        self.lane(act)
        self.watch.after_lanes()
        self.replica.optimizers.update()
        self.task.sched.step()


def group(task: Any) -> Any:
    return task.opt.param_groups[0]


def kept(task: Any) -> list[Any]:
    return list(task.opt.state.values())


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize(
    ("act", "named"),
    [
        (
            lambda task: group(task).update(lr=0.5),
            r"optimizer.param_groups\[0\]\['lr'\] was changed from 0\.\d+ to 0.5",
        ),
        (lambda task: group(task).update(nesterov=True), r"\['nesterov'\] was changed from False to True"),
        (lambda task: group(task).update(foreach=True), r"\['foreach'\] was changed from None to True"),
        (lambda task: group(task).update(new=1), r"\['new'\] was changed from gone to 1"),
        (lambda task: group(task).pop("initial_lr"), r"\['initial_lr'\] was changed from 0.1 to gone"),
        (lambda task: group(task)["band"].reverse(), r"\['band'\] was changed from \[\S+, \S+\] to \["),
        (lambda task: task.opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "optimizer.param_groups"),
        (lambda task: task.opt.defaults.update(lr=3), "optimizer.defaults was changed from"),
        (lambda task: setattr(task.opt, "power", 3), "optimizer.power was changed from 2 to 3"),
        (lambda task: task.opt.table.update(b=1), "optimizer.table was changed from"),
        (
            lambda task: setattr(task.opt, "mask", torch.ones(3)),
            r"optimizer.mask was changed from \[0.0, 0.0, 0.0\] .*to",
        ),
        (lambda task: task.opt.mask.add_(1.0), r"optimizer.mask was changed to \[1.0, 1.0, 1.0\]"),
        (lambda task: task.opt.table["a"].append(2.0), r"optimizer.table was changed from \{'a': \[1.0\]\} to"),
        (lambda task: task.opt.seen.add(2), "optimizer.seen was changed"),
        (lambda task: task.opt.deep[0]["b"].mul_(2), "optimizer.deep was changed to"),
        (lambda task: task.opt.register_step_pre_hook(print), "optimizer._optimizer_step_pre_hooks was changed"),
        (lambda task: setattr(task.opt, "shape", min), "optimizer.shape was changed from a .* to a "),
        (lambda task: task.sched.step(), r"schedule.last_epoch was changed from \d to \d"),
        (lambda task: task.sched._schedulers[1].base_lrs.append(1.0), r"schedule._schedulers\[1\].base_lrs was"),
        (lambda task: setattr(task.sched, "last_epoch", 40), r"schedule.last_epoch was changed from \d+ to 40"),
        (lambda task: [one["momentum_buffer"].zero_() for one in kept(task)], r"\['momentum_buffer'\] was changed"),
        (lambda task: [one.update(momentum_buffer=None) for one in kept(task)], r"\['momentum_buffer'\] was changed"),
        (lambda task: task.opt.state.clear(), "What the optimizer keeps was changed from 4 to 0 values"),
    ],
)
def test_what_a_lane_changes_of_an_optimizer_is_refused_by_name(act: Act, named: str, before: int) -> None:
    watched = Watched()
    for _ in range(before):
        watched.step(lambda _: None)
    with pytest.raises(UnsupportedModelError, match=named) as refused:
        watched.step(act)
    assert "in loss(), or where its samples are read" in refused.value.message
    assert "`schedule` in the job file" in refused.value.message


def test_a_tensor_among_the_settings_is_watched_and_told() -> None:
    watched = Watched(ByTensor)
    watched.step(lambda _: None)
    before = watched.replica.optimizers.settings.digest()
    with pytest.raises(UnsupportedModelError, match=r"\['lr'\] was changed to 0.02\d+ \(torch.float32\) in"):
        watched.step(lambda task: group(task)["lr"].mul_(0.5))
    assert watched.replica.optimizers.settings.digest() != before


@pytest.mark.parametrize(
    ("task", "act", "named"),
    [
        (ByTensor, lambda task: group(task)["betas"][0].mul_(0.9), r"param_groups\[0\]\['betas'\] was changed to"),
        (Wrapped, lambda task: task.opt.base.param_groups[0].update(lr=0.5), r"optimizer.base.param_groups\[0\]\['lr'"),
        (Wrapped, lambda task: setattr(task.opt.base, "new", 1), "optimizer.base.new was changed from gone to 1"),
    ],
)
def test_what_lies_deeper_is_watched_and_told(task: type[Task], act: Act, named: str) -> None:
    watched = Watched(task)
    watched.step(lambda _: None)
    settings = watched.replica.optimizers.settings
    before = settings.digest()
    with pytest.raises(UnsupportedModelError, match=named):
        watched.step(act)
    assert (settings.digest() != before) is ("new" not in named)


def test_what_an_optimizer_within_another_has_is_no_obstacle_to_a_load() -> None:
    state = copy.deepcopy(trained(Wrapped()).state())
    Replica(Wrapped(), gang.job(Keeps)).load(state)


def test_a_rate_that_changes_leaves_all_groups_watched() -> None:
    """It changes at every step, and only its own group is copied then."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [each], "mask": torch.ones(2)} for each in parameters], lr=0.1)
    watched = Settings({"": optimizer}, {}).watch
    watched.begin()
    optimizer.param_groups[1]["lr"] = 0.2
    watched.begin()
    watched.check("a lane")
    for number in (0, 1):
        optimizer.param_groups[number]["mask"] += 1
        with pytest.raises(UnsupportedModelError, match=rf"param_groups\[{number}\]\['mask'\] was changed"):
            watched.check("a lane")
        watched.begin()
    optimizer.param_groups.append({**optimizer.param_groups[1], "params": []})
    with pytest.raises(UnsupportedModelError, match="was changed"):
        watched.check("a lane")
    watched.begin()
    watched.check("a lane")


def test_of_what_many_parameters_have_all_is_watched_in_turn() -> None:
    watched = Watched(ByTensor)
    values = [(one, key) for one in watched.task.opt.state.values() for key in one]
    assert len(values) > 3 * IN_TURN
    for one, key in values:

        def write(_: Any, tensor: torch.Tensor = one[key]) -> None:
            tensor.add_(0)

        with pytest.raises(UnsupportedModelError, match=f"'{key}'"):
            for _ in range(len(values)):
                watched.step(write)


@pytest.mark.parametrize(
    "act",
    [
        lambda task: group(task).update(lr=float(str(group(task)["lr"]))),
        lambda task: group(task).update(band=list(group(task)["band"])),
        lambda task: task.opt.state[nn.Parameter(torch.ones(1))],
        lambda task: task.sched.get_last_lr(),
        lambda task: task.opt.zero_grad(),
        lambda task: task.opt.state_dict(),
    ],
)
def test_what_leaves_every_value_as_it_is_is_not_refused(act: Act) -> None:
    watched = Watched()
    for _ in range(3):
        watched.step(act)


def test_a_lane_that_is_given_up_leaves_no_setting_behind() -> None:
    """Where it was given up after its end, the update may have begun."""

    class RunsOut(Keeps):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            if batch is None:
                self.opt.param_groups[0]["lr"] = 7.0
                raise MemoryError
            return super().loss(model, batch)

    task = RunsOut()
    replica = trained(task)
    runner = LaneRunner(task, replica, LoneGradients(replica.trainable), StateWatch(task, replica), 3)
    runner.run(1, 0, [(2, tasks.Points()[0:2])], 2)  # type: ignore[index]
    group(task)["lr"] = 0.5
    runner.abandon(0)
    runner.watch.settings.begin()
    with pytest.raises(UserCodeError):
        runner.run(1, 0, [(2, None)], 2)
    with pytest.raises(UnsupportedModelError, match=r"from 0.5 to 7.0"):
        runner.abandon(0)


class EditsInLoss(Keeps):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        for each in self.opt.param_groups:
            each["lr"] *= 0.99
        return super().loss(model, batch)


class StepsInLoss(Keeps):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.opt._opt_called = True
        self.sched.step()
        return super().loss(model, batch)


class EditsInMetrics(Keeps):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        self.opt.param_groups[0]["lr"] *= 0.99
        return {"loss": self.loss(model, batch)}


class EditsInHook(Keeps):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda *_: self.opt.param_groups[0].update(lr=0.5))
        return model


class EditsInDataset(Keeps):
    def datasets(self) -> Any:
        task = self

        class Points(tasks.Points):
            def __getitem__(self, index: int) -> Any:
                if hasattr(task, "opt"):
                    task.opt.param_groups[0]["lr"] *= 0.99
                return super().__getitem__(index)

        return Points()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("task", "where"),
    [
        (EditsInLoss, r"lr'\] was changed from 0.\d+ to 0.\d+ in loss\(\)"),
        (StepsInLoss, r"schedule.* in loss\(\)"),
        (EditsInMetrics, r"lr'\] was changed from 0.\d+ to 0.\d+ in metrics\(\)"),
        (EditsInHook, r"lr'\] was changed from 0.\d+ to 0.5 in loss\(\)"),
        (EditsInDataset, r"lr'\] was changed from 0.\d+ to 0.\d+ in loss\(\), or where its samples are read"),
    ],
)
def test_a_task_that_changes_settings_outside_the_update_is_refused(
    task: type[Task], where: str, workers: int, tmp_path: Path
) -> None:
    """On several workers each would have changed them once for each of its lanes."""
    failure = gang.train(task, gang.job(task, evaluate={"every": 2}), workers, tmp_path).failure
    assert failure.kind == "UnsupportedModelError"
    with pytest.raises(UnsupportedModelError, match=where):
        raise UnsupportedModelError(failure.message)


def test_what_is_changed_behind_the_last_lane_is_refused_before_the_update() -> None:
    watched = Watched()
    watched.watch.settings.begin()
    watched.lane(lambda _: None)
    group(watched.task)["lr"] = 0.5
    with pytest.raises(UnsupportedModelError, match=r"\['lr'\] was changed from \S+ to 0.5"):
        watched.watch.after_lanes()


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_nor_does_the_next_step_or_evaluation_take_what_is_there_for_right(
    is_evaluated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop._step

    def other_after_it(loop: Loop, number: int) -> Any:
        request = step(loop, number)
        loop.replica.optimizers.by_name[""].param_groups[0]["lr"] = 0.5
        return request

    monkeypatch.setattr(Loop, "_step", other_after_it)
    task = tasks.Momentum if is_evaluated else Unevaluated
    failure = gang.train(task, gang.job(task, evaluate={"every": 1}), 2, tmp_path).failure
    assert "['lr'] was changed from 0.001 to 0.5" in failure.message


def test_settings_that_an_update_changes_are_no_fault(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluate": {"every": 2}, "checkpoint": {"every": 2}}
    ended = []
    for workers in (1, 2, 4):
        (tmp_path / str(workers)).mkdir()
        ended.append(gang.train(Keeps, gang.job(Keeps, **keys), workers, tmp_path / str(workers)).digest)
    assert len(set(ended)) == 1
    assert gang.train(Keeps, gang.job(Keeps, steps=9, **keys), 2, tmp_path / "1").ending == "complete"


def test_nor_are_those_of_the_steps_that_look_for_a_batch(tmp_path: Path) -> None:
    ended = gang.train(Keeps, gang.job(Keeps, lanes=1), 1, tmp_path, mode=RunMode(batch_for=1))
    assert ended.ending == "complete"


def editing(run: Run) -> None:
    """Sets the learning rate itself, where a step is done."""
    task = tasks.Momentum()
    model = task.model()
    model, optimizer = run.prepare(model, task.optimizer(model))
    for inputs, targets in run.batches(task.datasets()[0]):
        result = run.step(nn.functional.mse_loss(model(inputs).squeeze(-1), targets))
        if result is not None:
            optimizer.param_groups[0]["lr"] *= 0.5


def editing_after_epochs(run: Run) -> None:
    """Sets the learning rate itself, where an epoch is done."""
    task = tasks.Momentum()
    model = task.model()
    model, optimizer = run.prepare(model, task.optimizer(model))
    data = task.datasets()[0]
    for _ in run.epochs():
        for inputs, targets in run.batches(data):
            run.step(nn.functional.mse_loss(model(inputs).squeeze(-1), targets))
        optimizer.param_groups[0]["lr"] *= 0.5


def editing_in_lanes(run: Run) -> None:
    task = tasks.Momentum()
    model = task.model()
    model, optimizer = run.prepare(model, task.optimizer(model))
    for inputs, targets in run.batches(task.datasets()[0]):
        optimizer.param_groups[0]["lr"] *= 0.5
        run.step(nn.functional.mse_loss(model(inputs).squeeze(-1), targets))


@pytest.mark.parametrize("main", [editing, editing_after_epochs])
def test_a_loop_of_ones_own_changes_settings_between_steps(main: Any, tmp_path: Path) -> None:
    digests = {run(own_loop_of(main), tmp_path / f"{workers}", workers).ended.digest for workers in (1, 3)}
    assert len(digests) == 1 and None not in digests


def test_nor_does_one_change_them_in_a_lane(tmp_path: Path) -> None:
    refused = run(own_loop_of(editing_in_lanes), tmp_path / "lanes", 2).ended.failure
    assert "optimizer.param_groups[0]['lr'] was changed from" in refused.message


# --- replicas whose settings differ


class Unevaluated(tasks.Momentum):
    def datasets(self) -> Any:
        return tasks.Points()


def _other_rate(worker: int, loop: Any) -> None:
    if worker == 1:
        group_ = next(iter(loop.replica.optimizers.by_name.values())).param_groups[0]
        group_["lr"] *= 2


@pytest.mark.parametrize(
    "strategy",
    ["ring", {"kind": "parameter-server", "servers": 2}, "ddp", {"kind": "fsdp", "shard": 3}],
    ids=lambda each: each if isinstance(each, str) else each["kind"],
)
def test_a_worker_with_other_settings_is_named_at_the_next_step(strategy: Any, tmp_path: Path) -> None:
    spec = gang.job(tasks.Momentum, strategy=strategy, lanes=3, workers=3)
    failure = gang.train(tasks.Momentum, spec, 3, tmp_path, sabotage=_other_rate).failure
    assert failure.kind == "SettingsDiffer"
    assert failure.culprits == (1,)
    assert "The settings of the optimizers differ after step 0: worker 1 and " in failure.message
    assert "have 0.002 and 0.001 in optimizer.param_groups[0]['lr']; worker 1 is wrong" in failure.message


def test_a_save_compares_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one: after it no step would."""
    save = Loop._save

    def other_before_it(loop: Loop) -> None:
        _other_rate(loop.strategy.worker, loop)
        save(loop)

    monkeypatch.setattr(Loop, "_save", other_before_it)
    failure = gang.train(Unevaluated, gang.job(Unevaluated), 3, tmp_path).failure
    assert (failure.kind, failure.culprits) == ("SettingsDiffer", (1,))
    assert "The settings of the optimizers differ after step 6" in failure.message
    assert not any((tmp_path / "checkpoints").iterdir())


# --- saved, copied and taken up again


def test_settings_come_back_with_their_digest() -> None:
    replica, other = trained(Keeps()), Replica(Keeps(), gang.job(Keeps))
    state = copy.deepcopy(replica.state())
    assert state["settings"] == replica.optimizers.settings.digest() != other.optimizers.settings.digest()
    other.load(state)
    assert other.optimizers.settings.digest() == state["settings"]
    assert other.optimizers.settings.values() == replica.optimizers.settings.values()


def test_a_state_of_before_there_was_a_digest_is_taken_up() -> None:
    replica, other = trained(Keeps()), Replica(Keeps(), gang.job(Keeps))
    state = copy.deepcopy(replica.state())
    del state["settings"]
    other.load(state)
    assert other.optimizers.settings.digest() == replica.optimizers.settings.digest()


@pytest.mark.parametrize(
    "tamper",
    [
        lambda state: state["optimizers"][""]["param_groups"][0].update(lr=0.2),
        lambda state: state["optimizers"][""]["param_groups"][0].update(maximize=True),
        lambda state: state["schedulers"][""].update(last_epoch=7),
        lambda state: state.update(settings="0" * 32),
    ],
)
@pytest.mark.parametrize("load", [load_state, load_settings])
def test_settings_that_are_not_those_that_were_saved_are_found(tamper: Any, load: Any) -> None:
    state = copy.deepcopy(trained(Keeps()).state())
    other = Replica(Keeps(), gang.job(Keeps))
    tamper(state)
    with pytest.raises(RunError, match=r"settings of the optimizer are not those that were saved: .* and was \w{32}"):
        load(other.optimizers, state)


class Stepped(Keeps):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler
        parts: list[Any] = [scheduler.LinearLR(optimizer, total_iters=3), scheduler.MultiStepLR(optimizer, [1, 4])]
        return scheduler.SequentialLR(optimizer, parts, [3])


def test_counters_of_a_schedule_within_another_come_back(tmp_path: Path) -> None:
    for folder in ("parts", "whole"):
        (tmp_path / folder).mkdir()
    whole = gang.train(Stepped, gang.job(Stepped, steps=9), 1, tmp_path / "whole").digest
    assert gang.train(Stepped, gang.job(Stepped, steps=5), 2, tmp_path / "parts").ending == "complete"
    assert gang.train(Stepped, gang.job(Stepped, steps=9), 1, tmp_path / "parts").digest == whole


def test_a_schedule_that_does_not_come_back_is_named() -> None:
    class Forgets(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict({**state_dict, "last_epoch": 0})

    class Forgetful(Keeps):
        def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
            self.sched = Forgets(optimizer, 3)
            return self.sched

    task = Forgetful()
    replica = trained(task)
    task.sched.step()
    with pytest.raises(RunError, match=r"schedule\['last_epoch'\] was saved as 1, and is 0 after it was loaded"):
        Replica(Forgetful(), gang.job(Keeps)).load(copy.deepcopy(replica.state()))


def test_settings_that_the_task_gives_otherwise_now_are_no_damage() -> None:
    class Faster(tasks.Momentum):
        learning_rate: float = 0.5

    state = copy.deepcopy(trained(tasks.Momentum(), gang.job(tasks.Momentum)).state())
    branch = Replica(Faster(), gang.job(tasks.Momentum))
    branch.load(state)
    assert branch.optimizers.learning_rates == {"": 0.5}


# --- what it costs


def test_the_digest_follows_every_change() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "betas": [0.1]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    settings = Settings({"": optimizer}, {})
    seen = [settings.digest(), settings.digest()]
    assert seen[0] == seen[1]
    first = optimizer.param_groups[0]
    for change in (
        lambda: first.update(lr=0.2),
        lambda: first["betas"].append(0.3),
        lambda: first.update(fused=False),
        lambda: first.update(initial_lr=0.1),
        lambda: optimizer.param_groups.pop(),
    ):
        change()
        seen.append(settings.digest())
    assert len(set(seen)) == 6
    for value in (torch.zeros(200), torch.ones(200), numpy.float64(0.5), numpy.float32(0.25)):
        first["lr"] = value
        seen.append(settings.digest())
    assert len(set(seen)) == 10
    first["lr"] = nn.Parameter(torch.ones(200))
    assert settings.digest() == seen[-3]
    first["lr"] = 0.25
    assert settings.digest() == seen[-1]
    # Torch puts the parameters last where it loads a state.
    first["params"] = first.pop("params")
    assert settings.digest() == seen[-1]
