"""Units of work between workers and servers: what is computed, in which order, and that nothing counts twice."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits.bit_tasks import Adam, BatchNormAndDropout, Momentum, Regression
from quorate.core.errors import LossError, UnsupportedModelError
from quorate.data.ledger import Tally, total
from quorate.replica.replica import Replica
from quorate.strategies.servers.dealing import AppliedSet, Unit
from quorate.strategies.servers.unit_server import StepSettings
from quorate.task.task import Task
from strategies.servers.played_units import Before, Died, Played, slowed


def servers(mode: str = "asynchronous", **keys: Any) -> dict[str, Any]:
    return {"kind": "parameter-server", "mode": mode, **keys}


def played(task: type[Task], count: int = 1, strategy: dict[str, Any] | None = None, **keys: Any) -> Played:
    return Played(
        task, gang.job(task, **{"lanes": 3, "batch_size": 12, "strategy": strategy or servers()} | keys), count
    )


class Scheduled(Momentum):
    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


class Two(Regression):
    def optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, nn.Sequential)
        return {
            "first": torch.optim.SGD(model[0].parameters(), lr=1e-3, momentum=0.9),
            "second": torch.optim.Adam(model[2].parameters(), lr=1e-3),
        }

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return {"first": loss, "second": 2 * loss}


def by_hand(play: Played, steps: int, clip: float | None = None) -> Replica:
    """Plain torch, with an update for each lane by its mean gradient and its share of the rate."""
    task = play.task()
    replica = Replica(task, play.spec)
    for step in range(1, steps + 1):
        if replica.optimizers.are_scheduled_by_job:
            replica.optimizers.prepare(step, play.sampler)
        for lane in range(play.spec.lanes):
            share = play.sampler.share(step, lane)
            batch = torch.utils.data.default_collate([play.data[index] for index in share.tolist()])
            loss = task.loss(replica.model, batch)
            losses = loss if isinstance(loss, dict) else {"": loss}
            for parameter in replica.model.parameters():
                parameter.grad = None
            for name, each in losses.items():
                own = replica.optimizers.parameters(name) if name else list(replica.model.parameters())
                torch.autograd.backward(each, inputs=own, retain_graph=True)
                if clip is not None:
                    nn.utils.clip_grad_norm_(own, clip)
            _step(replica, len(share) / play.sampler.batch_samples(step))
        by_epoch = play.spec.schedule is not None and play.spec.schedule.per == "epoch"
        if not by_epoch or play.sampler.ends_epoch(step):
            for scheduler in replica.optimizers.schedulers.values():
                scheduler.step()
    return replica


def _step(replica: Replica, share: float) -> None:
    for optimizer in replica.optimizers.by_name.values():
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= share
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def meet(barrier: threading.Barrier) -> Before:
    """Everybody has pulled before anybody pushes."""

    def wait(_worker: int, _unit: Unit) -> None:
        barrier.wait(60)

    return wait


def assert_equal(found: dict[str, torch.Tensor], expected: Replica) -> None:
    for name, parameter in expected.trainable:
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        (Regression, {}),
        (Momentum, {"batch_size": 11}),
        (Adam, {"schedule": {"kind": "cosine", "warmup": 2}}),
        (Scheduled, {}),
        (Scheduled, {"schedule": {"per": "epoch"}, "batch_size": 24}),
        (Adam, {"schedule": {"kind": "linear", "per": "epoch"}, "batch_size": 24}),
        (Two, {"clip_norm": 0.1}),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_in_order_is_plain_torch_with_an_update_for_each_lane(
    task: type[Task], keys: dict[str, Any], count: int
) -> None:
    play = played(task, count, **keys)
    for boundary in (2, 3, 6):
        assert play.play(1, boundary) == []
    assert_equal(play.values(), by_hand(play, 6, keys.get("clip_norm")))
    assert set(play.late) == {0}


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_every_unit_is_applied_once_by_many_workers_and_servers(staleness: int | None) -> None:
    mode = "asynchronous" if staleness is None else "bounded"
    play = played(Momentum, 3, servers(mode, staleness=staleness, replicas=2), steps=8)
    draw = random.Random(5)
    for boundary in (3, 8):
        assert play.play(4, boundary, slowed(4 * draw.random())) == []
    everything = AppliedSet(3, 8)
    assert all(applied == everything for record in play.records for applied in record.sets())
    assert [play.agreements[step].samples for step in range(1, 9)] == [12] * 8
    read = total(Tally.of(play.sampler.epoch_of(step), play.sampler.batch(step)) for step in range(1, 9))
    assert total(play.agreements[step].tally for step in range(1, 9)) == read
    assert sum(play.late.values()) == 3 * 8
    assert staleness is None or play.largest_gap <= staleness


def test_replicas_hold_the_same_bits_as_their_primaries() -> None:
    play = played(Adam, 3, servers(replicas=2), steps=8)
    assert play.play(4, 8, slowed(2)) == []
    assert {len(places) for places in play.holders} == {2}
    for block in range(len(play.holders)):
        primary, replica = play.copies(block)
        assert torch.equal(primary, replica)


@pytest.mark.parametrize("ask", ["push", "follow"])
@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_worker_that_dies_among_its_messages_to_the_servers_is_made_up_for(ask: str, reached: int) -> None:
    play = played(Momentum, 3, servers(replicas=2), steps=6)
    sent: list[int] = []

    def die(worker: int, server: int, head: dict[str, Any]) -> None:
        if head["ask"] == ask and head["unit"] == (3, 1):
            sent.append(server)
            if len(sent) > reached:
                raise Died(worker)

    raised = play.play(2, 6, sending=die)
    assert any(isinstance(error, Died) for error in raised)
    having = [Unit(3, 1) in applied for record in play.records for applied in record.sets()]
    assert any(having) is (ask == "follow" or reached > 0)
    assert ask == "follow" or not all(having)
    assert play.play(2, 6) == []
    assert all(applied == AppliedSet(3, 6) for record in play.records for applied in record.sets())
    assert sorted(play.agreements) == [1, 2, 3, 4, 5, 6]


def test_schedules_go_back_with_a_segment_that_ends_too_early() -> None:
    """Else the next would begin with a rate that is scaled by a share, and with a schedule that is ahead."""
    play = played(Scheduled, steps=6)

    def die(_worker: int, unit: Unit) -> None:
        if unit == (5, 1):
            raise Died

    assert any(isinstance(error, Died) for error in play.play(1, 6, die))
    assert play.play(1, 6) == []
    assert_equal(play.values(), by_hand(play, 6))


class TensorRate(Scheduled):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))


def test_a_learning_rate_that_is_a_tensor_is_that_of_each_step() -> None:
    settings = StepSettings(played(TensorRate).replicas[0].optimizers, played(TensorRate).sampler, 0)

    def rate(step: int) -> float:
        settings.install(settings.at(step), 1.0)
        return float(settings.at(step)[0][0]["lr"])

    assert [rate(step) for step in (1, 2, 4, 1, 5, 4, 1)] == [0.5, 0.5, 0.25, 0.5, 0.125, 0.25, 0.5]


@pytest.mark.parametrize("task", [Scheduled, Momentum])
def test_at_a_boundary_those_whom_no_unit_came_to_have_the_settings_of_the_others(task: type[Task]) -> None:
    keys: dict[str, Any] = {} if task is Scheduled else {"schedule": {"kind": "cosine"}}
    plays = [played(task, **keys) for _ in range(2)]
    asked, idle = (StepSettings(play.replicas[0].optimizers, play.sampler, 0) for play in plays)
    asked.install(asked.at(2), 0.25)
    records = []
    for boundary in (3, 4):
        for settings, play in zip((asked, idle), plays, strict=True):
            settings.reach(boundary)
            records.append(play.replicas[0].optimizers.settings.values())
    assert records[0] == records[1] != records[2] == records[3]


class OnPlateau(Regression):
    def schedule(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def test_what_schedules_made_of_an_evaluation_stays_if_the_next_segment_ends_too_early() -> None:
    optimizers = played(OnPlateau).replicas[0].optimizers
    settings = StepSettings(optimizers, played(Scheduled).sampler, 0)
    settings.at(1)
    settings.reach(1)
    optimizers.react(1.0)
    optimizers.react(2.0)
    (rate,) = optimizers.learning_rates.values()
    settings.install(settings.at(2), 0.25)
    settings.go_back()
    assert list(optimizers.learning_rates.values()) == [rate]
    settings = StepSettings(optimizers, played(Scheduled).sampler, 1)
    settings.go_back()
    assert list(optimizers.learning_rates.values()) == [rate]


def test_a_boundary_is_not_before_a_unit_that_some_blocks_have() -> None:
    """A unit is on its way to the servers when its worker dies, and right after that somebody asks for a boundary."""
    play = played(Momentum, 2, servers(replicas=1), steps=6)
    sent: list[int] = []
    is_dead = threading.Event()

    def die(worker: int, server: int, head: dict[str, Any]) -> None:
        if head["ask"] == "push" and head["unit"] == (5, 0):
            sent.append(server)
            if len(sent) > 1:
                is_dead.set()
                raise Died(worker)

    def dawdle(_worker: int, unit: Unit) -> None:
        if unit == (3, 1):
            is_dead.wait(60)

    assert any(isinstance(error, Died) for error in play.play(2, 6, dawdle, die))
    assert {applied.furthest for record in play.records for applied in record.sets()} == {4, 5}
    play.is_asked = True
    assert play.play(1, 6) == []
    assert play.step == 5
    assert all(applied == AppliedSet(3, 5) for record in play.records for applied in record.sets())


@pytest.mark.parametrize("damping", [False, True])
def test_a_late_gradient_is_damped_if_the_job_wants_it(damping: bool) -> None:
    """Both workers compute from the first values; the second to push is late by one update."""
    play = played(Regression, 1, servers(damping=damping), lanes=2, steps=1)
    barrier = threading.Barrier(2)
    initial = {name: value.clone() for name, value in play.values().items()}
    assert play.play(2, 1, meet(barrier)) == []
    assert play.late == {0: 1, 1: 1}
    gradients = []
    for lane in range(2):
        task = play.task()
        replica = Replica(task, play.spec)
        share = play.sampler.share(1, lane)
        task.loss(replica.model, torch.utils.data.default_collate([play.data[i] for i in share.tolist()])).backward()
        gradients.append({name: p.grad for name, p in replica.trainable})
    factor = 0.5 / 1.5 if damping else 0.5

    def ended(first: int) -> bool:
        late = 1 - first
        return all(
            torch.allclose(
                play.values()[name],
                initial[name] - 1e-3 * (0.5 * gradients[first][name] + factor * gradients[late][name]),  # type: ignore[operator]
                rtol=1e-5,
                atol=1e-7,
            )
            for name in initial
        )

    assert ended(0) or ended(1)


def test_running_statistics_are_those_of_the_mean_over_lanes_where_all_begin_alike() -> None:
    play = played(BatchNormAndDropout, 2, lanes=2, steps=1)
    barrier = threading.Barrier(2)
    assert play.play(2, 1, meet(barrier)) == []
    found = dict(play.replicas[0].buffers.committed())
    assert found["2.num_batches_tracked"].item() == 1
    ring = gang_buffers(play)
    for name, value in ring.items():
        assert torch.allclose(found[name], value, rtol=1e-5), name


def gang_buffers(play: Played) -> dict[str, torch.Tensor]:
    means: dict[str, torch.Tensor] = {}
    for lane in range(2):
        task = play.task()
        replica = Replica(task, play.spec)
        share = play.sampler.share(1, lane)
        task.loss(replica.model, torch.utils.data.default_collate([play.data[i] for i in share.tolist()]))
        for name, value in replica.model.named_buffers():
            if value.is_floating_point():
                means[name] = means.get(name, torch.zeros_like(value)) + value * len(share) / 12
    return means


class Counting(Regression):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seen", torch.zeros(1))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.get_buffer("seen").add_(1)
        return super().loss(model, batch)


def test_a_buffer_without_a_rule_is_refused() -> None:
    raised = played(Counting).play(1, 1)
    assert any(isinstance(error, UnsupportedModelError) and "'seen'" in str(error) for error in raised)


class Poisoned(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        # The first sample of the set is in some lane of each epoch.
        has_it = (batch[0] == self.datasets()[0].inputs[0]).all(dim=1).any()
        return loss * float("nan") if has_it else loss


def test_a_unit_whose_loss_is_not_finite_fails_or_is_left_out() -> None:
    failed = played(Poisoned, epochs=1).play(1, 4)
    assert any(isinstance(error, LossError) and "not finite" in str(error) for error in failed)
    play = played(Poisoned, 2, epochs=1, on_nonfinite_loss="skip")
    assert play.play(2, 4) == []
    skipped = [each.skipped for each in play.agreements.values() if each.skipped is not None]
    assert len(skipped) == 1
    assert len(skipped[0].lanes) == 1
    assert skipped[0].is_partial
    assert 0 in skipped[0].samples
    assert sum(each.samples for each in play.agreements.values()) == 48 - len(skipped[0].samples)
    assert all(value.isfinite().all() for value in play.values().values())
