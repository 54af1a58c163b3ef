"""The vision transformer (Dosovitskiy et al., 2020): an image is cut into patches, and these are read like words.

::

    quorate train examples/models/vit_b16.yaml            # synthetic images where ImageNet is not there

With the defaults it is ViT-B/16: patches of 16×16 pixels, 12 blocks of width 768, 86,567,656 parameters. Weights begin
as in the authors' code: Glorot uniform, places 0.02, class token and classifier zero.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import quorate
from images import ImageClassification


class VitImageNet(ImageClassification):
    patch: int = 16
    width: int = 768
    heads: int = 12
    layers: int = 12
    dropout: float = 0.0
    learning_rate: float = 5e-4
    weight_decay: float = 0.1

    def model(self) -> nn.Module:
        return VisionTransformer(
            self.side, self.patch, self.classes, self.width, self.heads, self.layers, dropout=self.dropout
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)


class VisionTransformer(nn.Module):
    """Embeds the patches, puts a class token before them, and classifies what the blocks have made of that token."""

    def __init__(
        self, side: int, patch: int, classes: int, width: int, heads: int, layers: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patches of {patch} pixels do not fill a side of {side}")
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.empty(1 + (side // patch) ** 2, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classify = nn.Linear(width, classes)
        # As a linear map of the pixels of a patch, not as a convolution.
        nn.init.trunc_normal_(self.embed.weight, std=math.sqrt(1 / (3 * patch * patch)))
        nn.init.zeros_(self.embed.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.place, std=0.02)
        nn.init.zeros_(self.classify.weight)
        nn.init.zeros_(self.classify.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        hidden = self.blocks(self.drop(tokens + self.place))
        scores: torch.Tensor = self.classify(self.norm(hidden[:, 0]))
        return scores


class Block(nn.Module):
    """Attention among the patches, then a small network for each; each of them reads a normalised copy."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be shared equally by {heads} heads")
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width, eps=1e-6)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        # Query, key and value are three maps of their own: as one of three times the width they would begin smaller.
        for each in (*self.attend.weight.chunk(3), self.merge.weight, self.widen.weight, self.narrow.weight):
            nn.init.xavier_uniform_(each)
        for layer in (self.attend, self.merge):
            nn.init.zeros_(layer.bias)
        for layer in (self.widen, self.narrow):
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._dropped(self._attention(self.attention_norm(hidden)))
        widened = self._dropped(F.gelu(self.widen(self.network_norm(hidden))))
        return hidden + self._dropped(self.narrow(widened))

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.attend(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = quorate.attention(query, key, value)
        merged: torch.Tensor = self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return merged

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, self.dropout, self.training)
