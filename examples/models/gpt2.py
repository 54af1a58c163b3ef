"""GPT-2 (Radford et al., 2019): foretells the next token of a text.

::

    quorate train examples/models/gpt2.yaml               # 124M; random tokens where there is no text
    quorate train examples/models/gpt2_1b.yaml            # the same with 18 blocks of width 2048

With the defaults it has the shape of the smallest one: 12 blocks of width 768, and 124,439,808 parameters without the
padding. There is no dropout unless `params.dropout` says so; the paper had 0.1, on data read many times.

**The padding.** `params.pad_vocabulary`, on by default, widens the table of 50,257 tokens to 50,304, a multiple of 64,
with which GPUs multiply much faster. The additional rows are simply unused, not masked: no text has these tokens, so
training only ever pushes their scores down. Whoever samples from the model cuts them off: `scores[..., :50257]`.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quorate
from tokens import decayed_in_part, padded, token_windows


class Gpt2Pretraining(quorate.Task):
    data: Path = Path("../../data/openwebtext")
    vocabulary: int = 50_257
    pad_vocabulary: bool = True
    window: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.0
    learning_rate: float = 6e-4
    weight_decay: float = 0.1

    def model(self) -> nn.Module:
        rows = padded(self.vocabulary) if self.pad_vocabulary else self.vocabulary
        return Gpt2(rows, self.window, self.width, self.heads, self.layers, self.dropout)

    def datasets(self) -> tuple[Any, Any]:
        # One token more than the model reads: the last one is only foretold.
        return token_windows(self.data, self.window + 1, self.vocabulary)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        scores = model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten().long())

    def parallelize(self, model: nn.Module, mesh: Any) -> None:
        # With `strategy: {kind: fsdp, tensor: 2}`. Attention stays whole: query, key and value are one map, whose
        # columns one after the other are not those of some of the heads.
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, mesh, {"blocks.*.widen": ColwiseParallel(), "blocks.*.narrow": RowwiseParallel()})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = decayed_in_part(model, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))


class Gpt2(nn.Module):
    """Embeds tokens and their places, passes them through the blocks, and scores what follows each of them."""

    def __init__(self, vocabulary: int, window: int, width: int, heads: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.empty(window, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, vocabulary, bias=False)
        self.score.weight = self.embed.weight  # tied: one table reads tokens and foretells them
        self._initialise(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(tokens) + self.place[: tokens.shape[1]])
        scores: torch.Tensor = self.score(self.norm(self.blocks(hidden)))
        return scores

    def _initialise(self, layers: int) -> None:
        nn.init.normal_(self.place, std=0.01)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Every block adds twice to what flows past it: scaled so that the sum does not grow with the depth.
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.merge, block.narrow):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))


class Block(nn.Module):
    """Attention to what came before, then a small network for each place; each of them reads a normalised copy."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be shared equally by {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._dropped(self._attention(self.attention_norm(hidden)))
        widened = F.gelu(self.widen(self.network_norm(hidden)), approximate="tanh")
        return hidden + self._dropped(self.narrow(widened))

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.attend(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = quorate.attention(query, key, value, dropout=dropout, is_causal=True)
        merged: torch.Tensor = self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return merged

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, self.dropout, self.training)
