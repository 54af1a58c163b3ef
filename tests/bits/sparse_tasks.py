"""Tasks with embeddings that were built with sparse=True."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quorate

ROWS = 40


class Words:
    """Bags of words, some in every sample and some in few, with targets on several scales."""

    def __init__(self, samples: int = 50) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randint(0, ROWS, (samples, 3), generator=generator)
        self.words[:, 0] %= 4
        self.targets = torch.randn(samples, generator=generator) * 10 ** torch.randn(samples, generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words[index], self.targets[index]


class Model(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 6, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, 6, sparse=sparse, mode="sum")
        self.unused = nn.Embedding(4, 6, sparse=sparse)
        self.out = nn.Linear(6, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.tanh(self.words(words).sum(1)) + self.bags(words[:, 1:]))
        return found.squeeze(-1)


class Embeddings(quorate.Task):
    """The plainest one, with plain SGD."""

    sparse: bool = True

    def model(self) -> nn.Module:
        return Model(self.sparse)

    def datasets(self) -> Any:
        return Words(), Words(21)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words, targets = batch
        return F.mse_loss(model(words), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), 0.01)


class PerWord(Embeddings):
    """A sum and a count, by which gradients are divided once all lanes' counts are known."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words, targets = batch
        return (model(words) - targets).abs().sum(), words.numel()


class Rates(Embeddings):
    """Adagrad keeps a sum for each row."""

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adagrad(model.parameters(), 0.01)


class TwoKinds(Embeddings):
    """Tables and the rest have optimizers of their own."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words, targets = batch
        loss = F.mse_loss(model(words), targets)
        return {"tables": loss, "rest": loss * 2}

    def optimizer(self, model: nn.Module) -> Any:
        tables = [p for name, p in model.named_parameters() if not name.startswith("out")]
        return {
            "tables": torch.optim.SparseAdam(tables, 0.01),
            "rest": torch.optim.Adam([p for name, p in model.named_parameters() if name.startswith("out")], 0.01),
        }


class Momentum(Embeddings):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


class OnlyTables(Embeddings):
    """No parameter has a dense gradient."""

    def model(self) -> nn.Module:
        return nn.EmbeddingBag(ROWS, 1, sparse=self.sparse, mode="sum")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        words, targets = batch
        return F.mse_loss(model(words).squeeze(-1), targets)


class OnlyMoments(OnlyTables):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SparseAdam(list(model.parameters()), 0.01)
