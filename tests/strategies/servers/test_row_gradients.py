"""Sparse gradients of embeddings: of each lane the rows that it has touched, and nothing of the table's size."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from quorate.collectives.memory import GradientMemory
from quorate.core.errors import UnsupportedModelError
from quorate.replica import flat_gradients
from quorate.replica.gradients import gradient_plan, parameters_by_rows
from quorate.strategies.servers.rows import RowGradients, check_row_optimizers


@pytest.fixture(autouse=True, params=[0, 2**40], ids=["each at once", "all together"])
def moved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_gradients, "LARGE", request.param)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Embedding(6, 2)
        self.table = nn.Embedding(10, 2, sparse=True)
        self.bags = nn.EmbeddingBag(8, 2, sparse=True, mode="sum")
        self.out = nn.Linear(2, 1)

    def forward(self, rows: list[int]) -> torch.Tensor:
        numbers = torch.tensor(rows)
        found: torch.Tensor = self.out(self.table(numbers) + self.dense(numbers % 6)).sum()
        bags: torch.Tensor = self.bags(numbers.view(1, -1) % 8).sum()
        return found + bags


class Collected:
    """A model with its gradients in lanes 2 and 3."""

    def __init__(self) -> None:
        self.model = Model()
        self.trainable = list(self.model.named_parameters())
        self.by_rows = parameters_by_rows(self.model, self.trainable)
        plan = gradient_plan(self.trainable, 25.0, self.by_rows)
        self.memory = GradientMemory.of_process(plan, range(2, 4))
        self.gradients = RowGradients(self.trainable, plan, self.memory, self.by_rows)

    def lane(self, lane: int, *batches: tuple[list[int], float]) -> int:
        self.gradients.begin(lane)
        for rows, weight in batches:
            self.gradients.backward(self.model(rows), weight)
        return self.gradients.finish()


def test_only_layers_that_were_built_sparse_have_rows() -> None:
    collected = Collected()
    assert [collected.trainable[index][0] for index in sorted(collected.by_rows)] == ["table.weight", "bags.weight"]
    assert sum(bucket.numel() for bucket in collected.memory.total) == 6 * 2 + 2 + 1


def test_each_lane_has_the_rows_that_it_has_touched_and_the_rest_dense() -> None:
    collected = Collected()
    plain = Model()
    assert collected.lane(2, ([4, 1, 4], 0.5), ([1, 9], 0.25)) == 0b11111
    assert collected.lane(3, ([7], 1.0)) == 0b11111
    (0.5 * plain([4, 1, 4])).backward()
    (0.25 * plain([1, 9])).backward()
    for index, (name, parameter) in enumerate(plain.named_parameters()):
        assert parameter.grad is not None
        if index in collected.by_rows:
            rows = collected.gradients.rows[2][index]
            dense = parameter.grad.to_dense()
            assert rows.indices.tolist() == sorted({row % len(dense) for row in (4, 1, 9)})
            assert torch.equal(rows.values, dense[rows.indices])
        else:
            assert torch.equal(collected.gradients.lanes[2].views[index], parameter.grad), name
    assert collected.gradients.rows[3][1].indices.tolist() == [7]
    assert all(collected.trainable[index][1].grad is None for index in collected.by_rows), "it would be kept twice"


def test_a_lane_without_samples_has_no_rows() -> None:
    collected = Collected()
    collected.lane(2, ([4], 1.0))
    collected.gradients.clear(2)
    assert collected.gradients.rows[2] == {}
    collected.gradients.begin(3)
    assert collected.gradients.finish() == 0


def replaced(collected: Collected) -> None:
    collected.gradients.begin(2)
    collected.gradients.backward(collected.model([1]), 1.0)
    collected.model.table.weight.grad = None
    collected.gradients.backward(collected.model([2]), 1.0)


def replaced_at_the_end(collected: Collected) -> None:
    collected.gradients.begin(2)
    collected.gradients.backward(collected.model([1]), 1.0)
    collected.model.zero_grad()
    collected.gradients.finish()


def computed_in_the_loss(collected: Collected) -> None:
    collected.gradients.begin(2)
    collected.model([1]).backward()
    collected.gradients.backward(collected.model([2]), 1.0)


def used_as_a_dense_matrix(collected: Collected) -> None:
    collected.gradients.begin(2)
    collected.gradients.backward(collected.model([1]) + collected.model.table.weight.sum(), 1.0)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (replaced, "was detached"),
        (replaced_at_the_end, "was detached"),
        (computed_in_the_loss, r"computed by the task itself"),
        (used_as_a_dense_matrix, r"'table.weight' is dense, though.*sparse=False"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused_by_name(act: Callable[[Collected], None], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        act(Collected())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda p: SGD(p, 0.1), ""),
        (lambda p: SparseAdam(p), ""),
        (lambda p: Adagrad(p), ""),
        (lambda p: Adam(p), "Adam takes none"),
        (lambda p: SGD(p, 0.1, momentum=0.9), "momentum of SGD"),
        (lambda p: SGD(p, 0.1, weight_decay=0.1), "weight_decay of SGD"),
        (lambda p: Adagrad(p, weight_decay=0.1), "weight_decay of Adagrad"),
    ],
)
def test_an_optimizer_that_changes_other_rows_is_refused(
    made: Callable[[list[nn.Parameter]], Optimizer], text: str
) -> None:
    model = Model()
    trainable = list(model.named_parameters())
    by_rows = parameters_by_rows(model, trainable)
    dense = [parameter for index, (_, parameter) in enumerate(trainable) if index not in by_rows]
    optimizers = {"tables": made([trainable[index][1] for index in sorted(by_rows)]), "rest": Adam(dense)}
    if not text:
        check_row_optimizers(optimizers, trainable, by_rows)
        return
    with pytest.raises(UnsupportedModelError, match=f"'table.weight' has sparse gradients.*{text}"):
        check_row_optimizers(optimizers, trainable, by_rows)


@pytest.mark.parametrize("made", [lambda p: SGD([p], 0.1), lambda p: SparseAdam([p]), lambda p: Adagrad([p])])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_no_other_row_changes(made: Callable[[torch.Tensor], Optimizer]) -> None:
    """Else the workers would have other values than the servers."""
    table = nn.Embedding(50, 4, sparse=True)
    optimizer = made(table.weight)
    for rows in ([3, 7], [7, 20], [1]):
        before = table.weight.detach().clone()
        optimizer.zero_grad()
        table(torch.tensor(rows)).square().sum().backward()
        optimizer.step()
        assert (table.weight.detach() != before).any(1).nonzero().flatten().tolist() == sorted(rows)
