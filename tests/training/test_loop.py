"""What the loop does besides steps, the same on one worker and on three."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
from bits import bit_tasks
from quorate.data.ledger import Tally, total
from quorate.observe.events import RunBegan
from quorate.task.task import Task
from training import loop_tasks as tasks
from training.recorded import on_one_and_on_three, run


@pytest.mark.parametrize(
    ("every", "steps"), [(2, [2, 4, 5]), ("epoch", [4, 5]), ("end", [5])], ids=lambda value: str(value)
)
def test_evaluations_happen_when_the_job_says_and_always_at_the_end(
    every: int | str, steps: list[int], tmp_path: Path
) -> None:
    ran = on_one_and_on_three(tasks.Seen, tmp_path, steps=5, evaluate={"every": every})
    assert list(ran.metrics) == steps


def test_each_validation_sample_counts_once_also_in_an_uneven_last_batch(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.Seen, tmp_path, steps=1, evaluate={"batch_size": 4})
    expected = bit_tasks.Points(21).targets.double().sum().item()
    (metrics,) = ran.metrics.values()
    assert metrics["targets"] == pytest.approx(expected / 6)
    assert metrics["batches"] == 1.0
    assert metrics["samples"] == 21 / 6


def test_metrics_are_means_over_samples_or_sums_over_counts(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.Measured, tmp_path, steps=2, evaluate={"batch_size": 8})
    (metrics,) = ran.metrics.values()
    assert metrics["large"] == pytest.approx(metrics["loss"] / 2)
    assert metrics["size"] == pytest.approx((8 * 8 + 8 * 8 + 5 * 5) / 21)


def test_without_metrics_of_ones_own_the_loss_is_measured(tmp_path: Path) -> None:
    usual = on_one_and_on_three(bit_tasks.Regression, tmp_path / "usual", steps=2, evaluate={"batch_size": 8})
    measured = run(tasks.Measured, tmp_path / "measured", steps=2, evaluate={"batch_size": 8})
    assert usual.metrics[2] == {"loss": pytest.approx(measured.metrics[2]["loss"])}


def test_a_loss_per_token_is_measured_per_token(tmp_path: Path) -> None:
    """Texts differ in length, so a mean over batches would depend on how they are cut."""
    task = bit_tasks.TinyTransformer
    whole = on_one_and_on_three(task, tmp_path, steps=1, evaluate={"batch_size": 10})
    singly = run(task, tmp_path / "singly", steps=1, evaluate={"batch_size": 1})
    assert set(whole.metrics[1]) == {"loss"}
    assert singly.metrics[1]["loss"] == pytest.approx(whole.metrics[1]["loss"], rel=1e-5)


def test_the_best_evaluation_is_remembered_and_marked(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.Scripted, tmp_path, steps=6, evaluate={"every": 1})
    assert ran.ended.progress["best"] == {"value": 1.0, "step": 5}
    assert [step for step, best in ran.fields("evaluation", "best").items() if best] == [1, 2, 5]


def test_early_stop_stops_at_the_same_step_everywhere(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        tasks.Scripted, tmp_path, steps=6, evaluate={"every": 1}, early_stop={"metric": "loss", "patience": 2}
    )
    assert ran.ended.ending == "early stop"
    assert ran.ended.progress["cursor"] == [4, 1]
    assert ran.saved_steps[-1] == 4


def test_a_watched_metric_that_is_no_number_is_told_once(tmp_path: Path) -> None:
    ran = run(tasks.NoNumber, tmp_path, early_stop={"metric": "loss", "patience": 3}, evaluate={"every": 1}, steps=2)
    told = "loss is NaN, which is never the best: early_stop waits as if it had not improved"
    assert [list(each or ()) for each in ran.fields("evaluation", "warnings").values()] == [[told], []]


@pytest.mark.parametrize("stop_at", [2, pytest.param(3, marks=pytest.mark.long)])
def test_patience_goes_on_after_a_resume(stop_at: int, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluate": {"every": 1}, "early_stop": {"metric": "loss", "patience": 2}}
    undisturbed = run(tasks.Scripted, tmp_path / "undisturbed", 1, **keys)
    assert run(tasks.Scripted, tmp_path / "stopped", 3, stop_at, **keys).ended.ending == "interrupted"
    resumed = run(tasks.Scripted, tmp_path / "stopped", 2, **keys)
    assert resumed.ended.ending == "early stop"
    assert resumed.ended.progress == undisturbed.ended.progress
    assert resumed.ended.digest == undisturbed.ended.digest


def test_a_job_that_stopped_early_stays_stopped(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"evaluate": {"every": 1}, "early_stop": {"metric": "loss", "patience": 1}}
    first = run(tasks.Scripted, tmp_path / "run", **keys)
    again = run(tasks.Scripted, tmp_path / "run", 2, **keys)
    assert again.ended.ending == first.ended.ending == "early stop"
    assert again.ended.progress == first.ended.progress
    assert again.fields("step", "loss") == {}


def test_a_plateau_schedule_lowers_the_rate_after_an_evaluation(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.Plateau, tmp_path, steps=6, evaluate={"every": 1})
    rates = list(ran.fields("step", "learning_rate").values())
    assert rates == [1e-3, 1e-3, 1e-3, 5e-4, 2.5e-4, 2.5e-4]


@pytest.mark.parametrize("strategy", ["ring", "ddp", {"kind": "parameter-server", "servers": 2}], ids=str)
def test_the_rates_that_are_told_of_a_step_are_those_that_it_has_used(strategy: Any, tmp_path: Path) -> None:
    ran = run(tasks.Halving, tmp_path, 2, steps=4, strategy=strategy)
    for name, first in {"make": 1e-2, "judge": 1e-3}.items():
        told = ran.fields("step", f"learning_rate.{name}")
        assert told == {step: pytest.approx(first * 0.5 ** (step - 1)) for step in (1, 2, 3, 4)}


@pytest.mark.long
def test_a_plateau_schedule_goes_on_after_a_resume(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 6, "evaluate": {"every": 1}}
    undisturbed = run(tasks.Plateau, tmp_path / "undisturbed", **keys)
    run(tasks.Plateau, tmp_path / "stopped", 2, 3, **keys)
    resumed = run(tasks.Plateau, tmp_path / "stopped", 3, **keys)
    assert resumed.ended.digest == undisturbed.ended.digest
    rates = undisturbed.fields("step", "learning_rate")
    assert resumed.fields("step", "learning_rate") == {step: rates[step] for step in (4, 5, 6)}


@pytest.mark.parametrize(
    ("task", "keys", "text"),
    [
        (tasks.Plateau, {}, "evaluate.metric: there is no metric 'loss'; metrics.. gives f1"),
        (tasks.Scripted, {"evaluate": {"every": 1, "metric": "accuracy"}}, "no metric 'accuracy'.*f1"),
        (tasks.Scripted, {"early_stop": {"metric": "loss", "patience": 1}}, "early_stop.metric.*'loss'.*f1"),
    ],
)
def test_a_metric_that_is_waited_for_and_never_comes(
    task: type[Task], keys: dict[str, Any], text: str, tmp_path: Path
) -> None:
    ran = run(task, tmp_path / "run", params={"wrong_metric": True}, **{"evaluate": {"every": 1}, **keys})
    assert re.search(text, ran.ended.failure.message)


def test_logged_numbers_are_means_over_the_samples_of_the_step(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.Logging, tmp_path, steps=3, batch_size=13, evaluate={"every": 1})
    logs = ran.fields("step", "log")
    assert [log["size"] for log in logs.values()] == [pytest.approx((4 * 4 + 3 * 3 * 3) / 13)] * 3
    assert all(log.get("sometimes", 2.5) == 2.5 for log in logs.values())
    assert not any("from_metrics" in log for log in logs.values())
    assert len({log["mean_target"] for log in logs.values()}) == 3


def test_a_step_tells_loss_rate_norm_samples_and_epoch(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        bit_tasks.Adam, tmp_path, epochs=2, last_batch="keep", schedule={"kind": "linear", "warmup": 2}
    )
    assert list(ran.fields("step", "samples").values()) == [12, 12, 12, 12, 2] * 2
    assert list(ran.fields("step", "epoch").values()) == [0] * 5 + [1] * 5
    rates = list(ran.fields("step", "learning_rate").values())
    assert rates[:3] == [pytest.approx(5e-4), pytest.approx(1e-3), pytest.approx(1e-3)]
    assert all(norm > 0 for norm in ran.fields("step", "gradient_norm").values())
    (began,) = [event for event in ran.events if event.kind == "run"]
    assert isinstance(began, RunBegan)
    assert (began.from_step, began.total_steps, began.steps_per_epoch) == (0, 10, 5)
    assert (began.epoch_length, began.dataset_samples) == (50, 50)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_steps_of_an_epoch_tell_each_sample_once_or_as_dropped(accumulate: int, tmp_path: Path) -> None:
    ran = on_one_and_on_three(bit_tasks.Regression, tmp_path, epochs=2, accumulate=accumulate)
    ledgers = [Tally.from_hex(text) for text in ran.fields("step", "ledger").values()]
    dropped = ran.fields("step", "dropped")
    assert {step for step, listed in dropped.items() if listed} == {4, 8}
    for epoch, last in ((0, 4), (1, 8)):
        assert len(dropped[last]) == 2
        assert total(ledgers[last - 4 : last]) + Tally.of(epoch, dropped[last]) == Tally.of_order(epoch, range(50))
    assert set(ran.fields("step", "own_order").values()) == set(ran.fields("step", "planned").values()) == {None}


def test_an_order_of_ones_own_is_told_with_what_it_gives(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.Ordered, tmp_path, epochs=2)
    assert set(ran.fields("step", "own_order").values()) == {True}
    ledgers = [Tally.from_hex(text) for text in ran.fields("step", "ledger").values()]
    planned, dropped = ran.fields("step", "planned"), ran.fields("step", "dropped")
    for epoch, last in ((0, 2), (1, 4)):
        order = tasks.Ordered().order(epoch, torch.Generator())
        assert dropped[last] == sorted(order[24:])
        assert planned[last] == str(Tally.of(epoch, order))
        assert planned[last] == str(total(ledgers[last - 2 : last]) + Tally.of(epoch, dropped[last]))


def test_two_optimizers_are_told_by_name(tmp_path: Path) -> None:
    ran = on_one_and_on_three(bit_tasks.TwoOptimizers, tmp_path, steps=2)
    for field in ("loss", "learning_rate", "gradient_norm"):
        assert set(ran.fields("step", field).values()) == {None}
        assert all(isinstance(value, float) for value in ran.fields("step", f"{field}.make").values())
        assert all(isinstance(value, float) for value in ran.fields("step", f"{field}.judge").values())


def test_initial_weights_are_where_training_starts(tmp_path: Path) -> None:
    preset = on_one_and_on_three(tasks.Preset, tmp_path / "preset", steps=2)
    usual = run(bit_tasks.Regression, tmp_path / "usual", steps=2)
    assert preset.ended.digest != usual.ended.digest
    assert run(tasks.Preset, tmp_path / "seed", steps=2).ended.losses == preset.ended.losses


@pytest.mark.parametrize(
    ("task", "loader_workers"),
    [
        (tasks.DictBatches, 0),
        (tasks.DataclassBatches, 1),
        pytest.param(tasks.DictBatches, 1, marks=pytest.mark.long),
        pytest.param(tasks.DataclassBatches, 0, marks=pytest.mark.long),
    ],
)
def test_batches_of_dicts_and_dataclasses_train_as_tuples_do(
    task: type[Task], loader_workers: int, tmp_path: Path
) -> None:
    ran = on_one_and_on_three(task, tmp_path, steps=2, loader_workers=loader_workers)
    assert ran.ended.digest == run(bit_tasks.Regression, tmp_path / "tuples", steps=2).ended.digest


def test_a_layer_kept_in_evaluation_mode_stays_so(tmp_path: Path) -> None:
    ran = on_one_and_on_three(tasks.KeptInEvaluation, tmp_path, steps=4, evaluate={"every": 1})
    assert {log["modes"] for log in ran.fields("step", "log").values()} == {0b1101}


@pytest.mark.parametrize(
    "task", [bit_tasks.BatchNormAndDropout, pytest.param(bit_tasks.RandomTransform, marks=pytest.mark.long)]
)
def test_evaluation_does_not_disturb_training(task: type[Task], tmp_path: Path) -> None:
    often = on_one_and_on_three(task, tmp_path, batch_size=20, steps=4, evaluate={"every": 1})
    rarely = run(task, tmp_path / "rarely", batch_size=20, steps=4, evaluate={"every": "end"})
    assert often.ended.digest == rarely.ended.digest
    assert often.ended.losses == rarely.ended.losses
    assert len(often.metrics) == 4


def test_checkpoints_come_every_so_many_steps_and_old_ones_go(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        bit_tasks.Regression, tmp_path, steps=7, checkpoint={"every": 2, "keep": 2}, evaluate={"every": "end"}
    )
    assert list(ran.fields("checkpoint", "path")) == [2, 4, 6, 7]
    assert ran.saved_steps[-2:] == [6, 7]
    assert len(ran.saved_steps) <= 3


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        tasks.Scripted,
        tmp_path,
        steps=6,
        params={"script": [3.0, 1.0, 2.0, 2.0, 2.0, 2.0]},
        evaluate={"every": 1},
        checkpoint={"every": 1, "keep": 2},
    )
    assert ran.saved_steps == [2, 5, 6]


def test_every_new_best_is_saved_and_kept_until_a_better_one_comes(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        tasks.Scripted,
        tmp_path,
        steps=6,
        params={"script": [3.0, 2.0, 2.5, 1.0, 1.0, 1.5]},
        evaluate={"every": 1},
        checkpoint={"keep": 1, "when_busy": "skip", "minutes": 0},
    )
    assert list(ran.fields("checkpoint", "path")) == [1, 2, 4, 6]
    assert ran.saved_steps == [4, 6]


def test_the_best_that_is_found_where_a_job_goes_on_is_saved_too(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 4, "evaluate": {"every": 1}, "params": {"script": [3.0, 1.0, 2.0, 2.0]}}
    stopped = run(tasks.Scripted, tmp_path / "run", 3, 2, **keys)
    assert stopped.ended.progress["cursor"] == [2, 0], "not evaluated yet"
    resumed = run(tasks.Scripted, tmp_path / "run", 2, **keys)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002-evaluated").is_dir()
    assert resumed.saved_steps[-1] == 4


def test_checkpoints_at_the_end_of_every_epoch(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        bit_tasks.Regression, tmp_path, epochs=3, checkpoint={"every": "epoch", "keep": 9}, evaluate={"every": "end"}
    )
    per_epoch, rest = divmod(ran.ended.progress["cursor"][0], 3)
    assert rest == 0
    assert ran.saved_steps == [per_epoch, 2 * per_epoch, 3 * per_epoch]


@pytest.mark.long
def test_keeping_checkpoints_more_often_does_not_change_the_bits(tmp_path: Path) -> None:
    often = run(bit_tasks.Adam, tmp_path / "often", 2, checkpoint={"every": 1})
    assert often.ended.digest == run(bit_tasks.Adam, tmp_path / "rarely").ended.digest


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stop_request_ends_all_workers_at_its_step_with_a_checkpoint(workers: int, tmp_path: Path) -> None:
    ran = run(bit_tasks.Momentum, tmp_path / "run", workers, 3)
    assert ran.ended.ending == "interrupted"
    assert ran.ended.progress["cursor"] == [3, 0]
    assert ran.saved_steps == [3]
    assert len(ran.ended.losses) == 3


def test_lanes_with_different_numbers_of_micro_batches_count_batch_norm_as_lane_0_does(tmp_path: Path) -> None:
    ran = on_one_and_on_three(
        tasks.UnevenMicroBatches, tmp_path, lanes=3, batch_size=9, accumulate=3, epochs=1, last_batch="keep"
    )
    assert len(ran.ended.losses) == 6, "50 samples: five whole batches and one of five, in lanes of 2, 2 and 1"


def test_a_buffer_that_grows_goes_through_a_checkpoint(tmp_path: Path) -> None:
    undisturbed = on_one_and_on_three(tasks.Growing, tmp_path)
    run(tasks.Growing, tmp_path / "stopped", 2, 3)
    assert run(tasks.Growing, tmp_path / "stopped", 3).ended.digest == undisturbed.ended.digest


def test_a_batch_in_which_nothing_counts_is_refused_before_it_ruins_the_weights(tmp_path: Path) -> None:
    failure = run(tasks.NothingCounted, tmp_path / "run", 2).ended.failure
    assert failure.kind == "LossError"
    assert "count" in failure.message
    assert "step 1" in failure.message


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        ("list", "MetricError", "metrics() returned a list of one value; it must return a dict of numbers by name"),
        ("triple", "MetricError", "metrics() returned a tuple of 3 values as 'loss'; a tuple must be (sum, count)"),
        ("raise", "UserCodeError", "KeyError: 'no such metric' (in metrics())"),
    ],
)
def test_metrics_that_are_none(result: str, kind: str, text: str, tmp_path: Path) -> None:
    failure = run(tasks.BadMetrics, tmp_path / "run", steps=1, params={"result": result}).ended.failure
    assert failure.kind == kind
    assert text in failure.message


def test_a_replica_that_differs_is_found_by_tensor_and_worker(tmp_path: Path) -> None:
    def flip_a_bit(position: int, loop: Any) -> None:
        if position == 1:
            with torch.no_grad():
                next(loop.replica.model.parameters()).view(-1)[0] += 1e-3

    ended = gang.train(bit_tasks.Regression, gang.job(bit_tasks.Regression), 3, tmp_path, sabotage=flip_a_bit)
    assert ended.failure.kind == "ReplicasDiffer"
    assert "worker 1 and workers 0, 2 hold different bits" in ended.failure.message
    assert "first in '0.weight'" in ended.failure.message


def test_clipping_is_told_by_the_norm_before_it(tmp_path: Path) -> None:
    clipped = on_one_and_on_three(bit_tasks.Regression, tmp_path, steps=2, clip_norm=1e-3)
    free = run(bit_tasks.Regression, tmp_path / "free", steps=2)
    norms, free_norms = clipped.fields("step", "gradient_norm"), free.fields("step", "gradient_norm")
    assert norms[1] == pytest.approx(free_norms[1])
    assert norms[1] > 1e-3
    assert clipped.ended.digest != free.ended.digest


def test_what_is_put_back_is_named_once_in_a_run_whoever_hosts_what(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"steps": 5, "evaluate": {"every": 1}, "checkpoint": {"every": 1}}
    ran = on_one_and_on_three(bit_tasks.RunningMean, tmp_path / "metrics", **keys)
    told = {step: warnings for step, warnings in ran.fields("evaluation", "warnings").items() if warnings}
    assert list(told) == [1]
    assert "put back at its end: 'self.count', 'self.total'." in told[1][0]
    ran = on_one_and_on_three(bit_tasks.RefinesLater, tmp_path / "loss", steps=4)
    told = {step: warnings for step, warnings in ran.fields("step", "warnings").items() if warnings}
    assert sum(sentence.count("'model.aux_loss'") for sentences in told.values() for sentence in sentences) == 1
    interrupted = run(bit_tasks.RunningMean, tmp_path / "resumed", 2, 2, **keys)
    resumed = run(bit_tasks.RunningMean, tmp_path / "resumed", 3, **keys)
    assert [w for w in interrupted.fields("evaluation", "warnings").values() if w]
    assert not any(resumed.fields("evaluation", "warnings").values())
