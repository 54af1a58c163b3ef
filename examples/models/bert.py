"""BERT (Devlin et al., 2018), trained to fill in tokens that were hidden: masked language modelling.

::

    quorate train examples/models/bert_large.yaml         # random tokens where there is no text

With the defaults it is BERT-Large: 24 blocks of width 1024, and 335,174,458 parameters without the padding. These are
the embeddings (31.8 M), the blocks (302.3 M) and the head that foretells hidden tokens (1.1 M; its table is that of the
embeddings). The pooler and the prediction of the next sentence (1.05 M) are left out, as in later work.

`params.pad_vocabulary`, on by default, widens the table of 30,522 tokens to 30,528; the additional rows are simply
unused, as in gpt2.py. There is no dropout unless `params.dropout` says so; the paper had 0.1.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import quorate
from tokens import decayed_in_part, padded, token_windows

IGNORED = -100


class BertPretraining(quorate.Task):
    data: Path = Path("../../data/wikipedia")
    vocabulary: int = 30_522
    pad_vocabulary: bool = True
    mask_token: int = 103
    window: int = 128
    places: int = 512  # the longest window that the model can read
    width: int = 1024
    heads: int = 16
    layers: int = 24
    dropout: float = 0.0
    learning_rate: float = 1e-4
    weight_decay: float = 0.01

    def model(self) -> nn.Module:
        rows = padded(self.vocabulary) if self.pad_vocabulary else self.vocabulary
        return Bert(rows, self.places, self.width, self.heads, self.layers, self.dropout)

    def datasets(self) -> tuple[Any, Any]:
        return token_windows(self.data, self.window, self.vocabulary)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        shown, hidden = masked(tokens, self.vocabulary, self.mask_token)
        return F.cross_entropy(model(shown).flatten(0, 1), hidden.flatten(), ignore_index=IGNORED)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = decayed_in_part(model, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.learning_rate, eps=1e-6)


def masked(tokens: torch.Tensor, vocabulary: int, mask_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model is shown, and the tokens that it is to foretell; elsewhere the latter are IGNORED.

    Of every window 15 % of the places are chosen, always as many, so that a mean over places is one over windows. There
    80 % show the mask, 10 % another token and 10 % what was there. Drawn from torch's generator on the device: the
    stream belongs to the step and the lane.
    """
    shape, device = tokens.shape, tokens.device
    chosen = max(1, round(0.15 * shape[1]))
    # The places with the highest of random numbers, of which no two are equal. A sort of all of them would do as well,
    # but its compiled kernel takes minutes to compile.
    numbers = torch.randint(0, 2**40, shape, device=device) * shape[1] + torch.arange(shape[1], device=device)
    is_hidden = numbers >= numbers.topk(chosen, dim=1).values[:, -1:]
    kind = torch.rand(shape, device=device)
    others = torch.randint(0, vocabulary, shape, dtype=tokens.dtype, device=device)
    # Numbers are filled in: torch.where() would copy each of them to the device first.
    shown = tokens.masked_fill(is_hidden & (kind < 0.8), mask_token)
    shown = torch.where(is_hidden & (kind >= 0.9), others, shown)
    return shown, tokens.long().masked_fill(~is_hidden, IGNORED)


class Bert(nn.Module):
    """Embeds tokens and their places, passes them through the blocks, and scores which token belongs at each place."""

    def __init__(self, vocabulary: int, places: int, width: int, heads: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.empty(places, width))
        self.segment = nn.Embedding(2, width)
        self.embed_norm = nn.LayerNorm(width, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=1e-12)
        self.score = nn.Linear(width, vocabulary)
        self.score.weight = self.embed.weight  # tied: one table reads tokens and foretells them
        self._initialise()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # A window is one piece of text, so all of it is in the first of the two segments.
        embedded = self.embed(tokens) + self.place[: tokens.shape[1]] + self.segment.weight[0]
        hidden = self.blocks(self.drop(self.embed_norm(embedded)))
        scores: torch.Tensor = self.score(self.transform_norm(F.gelu(self.transform(hidden))))
        return scores

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.place, std=0.02, a=-0.04, b=0.04)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention to all places, then a small network for each; the sum with what came in is normalised after each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be shared equally by {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.network_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.attention_norm(hidden + self._dropped(self._attention(hidden)))
        widened = F.gelu(self.widen(hidden))
        normalised: torch.Tensor = self.network_norm(hidden + self._dropped(self.narrow(widened)))
        return normalised

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.attend(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = quorate.attention(query, key, value, dropout=dropout)
        merged: torch.Tensor = self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return merged

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, self.dropout, self.training)
