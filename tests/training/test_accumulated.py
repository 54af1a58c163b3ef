"""Metrics that are no means: the same bits on any number of workers, and those of one process over all samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision, BinaryF1Score
from torchmetrics.text import BLEUScore

import gang
from bits.bit_tasks import Regression
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import MetricError
from quorate.replica.replica import Replica
from quorate.training.measurement import compute, take_states
from training.test_sanity_check import refused


class Recall:
    """A metric without any library."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.metric_state: dict[str, Any] = {"found": 0, "all": 0}

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        self.metric_state["found"] += int(((scores > 0.5) & (labels == 1)).sum())
        self.metric_state["all"] += int(labels.sum())

    def merge_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.metric_state[name] += value

    def compute(self) -> float:
        return float(self.metric_state["found"] / max(1, self.metric_state["all"]))


def scored(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch
    return torch.sigmoid(model(inputs).squeeze(-1)), (targets > 0).long()


class Ranks(Regression):
    made: ClassVar[dict[str, Any]] = {"auroc": BinaryAUROC, "f1": BinaryF1Score, "recall": Recall}

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        given = {name: make() for name, make in self.made.items()}
        for metric in given.values():
            metric.update(*scored(model, batch))
        return {"loss": self.loss(model, batch), **given}


class Keeps(Ranks):
    """A metric that the task keeps, and a collection, in which two share what they have seen."""

    def __init__(self) -> None:
        self.f1 = BinaryF1Score()

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        collected = MetricCollection({"auroc": BinaryAUROC(), "precision": BinaryAveragePrecision()})
        collected.update(*scored(model, batch))
        self.f1.update(*scored(model, batch))
        return {**collected, "f1": self.f1}


def trained(task: type[Ranks], count: int, folder: Path, **keys: Any) -> tuple[dict[str, float], str]:
    folder.mkdir()
    ended = gang.train(task, gang.job(task, evaluate={"every": 3, "batch_size": 4}, **keys), count, folder)
    assert ended.digest
    assert "put back" not in ended.log
    return ended.progress["metrics"], ended.digest


def of_one_process(task: type[Ranks], folder: Path) -> dict[str, float]:
    """The same metrics of all samples at once, by the model of the last checkpoint."""
    replica = Replica(task(), gang.job(task))
    checkpoints = CheckpointFolder(folder / "checkpoints")
    newest = checkpoints.search().newest
    assert newest is not None
    replica.load(checkpoints.load(newest).state["replica"])
    _, validation = task().datasets()
    with torch.no_grad():
        scores, labels = scored(replica.model.eval(), (validation.inputs, validation.targets))
    found: dict[str, Any] = {"auroc": BinaryAUROC(), "f1": BinaryF1Score(), "recall": Recall()}
    for metric in found.values():
        metric.update(scores, labels)
    return {name: float(metric.compute()) for name, metric in found.items()}


def test_auroc_and_f1_are_the_same_on_any_number_of_workers_and_in_one_process(tmp_path: Path) -> None:
    found = {workers: trained(Ranks, workers, tmp_path / str(workers)) for workers in (1, 2, 3)}
    metrics, _ = found[1]
    assert found[2] == found[1]
    assert found[3] == found[1]
    alone = of_one_process(Ranks, tmp_path / "3")
    assert {name: metrics[name] for name in alone} == alone
    assert 0 < metrics["auroc"] < 1
    assert 0 < metrics["f1"] < 1


def test_metrics_that_a_task_keeps_or_that_share_their_state_begin_anew_with_each_batch(tmp_path: Path) -> None:
    kept, digest = trained(Keeps, 2, tmp_path / "kept")
    fresh, same = trained(Ranks, 1, tmp_path / "fresh")
    assert (kept["auroc"], kept["f1"], digest) == (fresh["auroc"], fresh["f1"], same)


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": {"kind": "parameter-server", "servers": 2}},
        pytest.param({"strategy": "ddp"}, marks=pytest.mark.long),
        pytest.param({"strategy": {"kind": "fsdp", "shard": 2}, "workers": 2}, marks=pytest.mark.long),
        pytest.param(
            {"strategy": {"kind": "parameter-server", "mode": "bounded", "staleness": 1}}, marks=pytest.mark.long
        ),
    ],
    ids=lambda keys: str(keys["strategy"]),
)
def test_every_strategy_computes_them_of_all_batches(keys: dict[str, Any], tmp_path: Path) -> None:
    metrics, _ = trained(Ranks, 2, tmp_path / "several", **keys)
    assert metrics.keys() == {"loss", "auroc", "f1", "recall"}
    if keys["strategy"] == {"kind": "parameter-server", "servers": 2}:
        assert metrics == trained(Ranks, 1, tmp_path / "ring")[0]


def test_a_metric_that_needs_all_it_has_seen_and_one_that_gives_several_numbers() -> None:
    said, meant = ["a dog ran off in the rain", "the cat sits on a mat"], [["a dog ran off"], ["the cat sits here"]]
    states: list[bytes] = []
    for text, wanted in zip(said, meant, strict=True):
        bleu = BLEUScore(n_gram=2)
        bleu.update([text], [wanted])
        states += take_states({"bleu": bleu}).values()
    whole = BLEUScore(n_gram=2)
    whole.update(said, meant)
    assert compute("bleu", BLEUScore(n_gram=2), states) == {"bleu": float(whole.compute())}

    class Both(Recall):
        def compute(self) -> Any:
            return {"found": self.metric_state["found"], "all": self.metric_state["all"]}

    metric = Both()
    metric.update(torch.tensor([0.9, 0.1]), torch.tensor([1, 1]))
    assert compute("n", metric, [*take_states({"n": metric}).values()]) == {"n/found": 1.0, "n/all": 2.0}


@pytest.mark.parametrize(
    "make",
    [lambda: MinMaxMetric(BinaryAccuracy()), lambda: BinaryAUROC() + BinaryF1Score() * 2],
    ids=["a wrapper", "a sum"],
)
def test_metrics_within_a_metric_are_merged_too(make: Callable[[], Any]) -> None:
    batched, whole = make(), make()
    states: list[bytes] = []
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        batch = torch.rand(10, generator=draw), torch.randint(2, (10,), generator=draw)
        batched.update(*batch)
        whole.update(*batch)
        states += take_states({"m": batched}).values()
    expected = whole.compute()
    numbers = {f"m/{key}": each for key, each in expected.items()} if isinstance(expected, dict) else {"m": expected}
    assert compute("m", batched, states) == {name: float(number) for name, number in numbers.items()}
    assert all(number > 0 for number in numbers.values())


class NoMerge(Recall):
    merge_state: Any = property()


class NoNumber(Recall):
    def compute(self) -> Any:
        return torch.ones(3)


class KeepsAnObject(Recall):
    def reset(self) -> None:
        self.metric_state = {"found": object()}


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (NoMerge, "metric 'f1' (NoMerge) has no merge_state(state)"),
        (NoNumber, "compute() of metric 'f1' gave a Tensor of shape (3,); it must be one number"),
        (KeepsAnObject, "metric 'f1' keeps something in its metric_state that cannot travel between workers"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name_before_the_first_step(metric: type[Recall], text: str) -> None:
    assert text in refused(lambda *_: {"f1": metric()}).message
    with pytest.raises(MetricError):
        compute("f1", metric(), [*take_states({"f1": metric()}).values()])
