"""Models that are cut across, each with a batch and a loss, in float64; and what every process compares."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert import Bert
from gpt2 import Gpt2
from quorate.strategies.gangs.linear_flow import trace_flow
from quorate.strategies.gangs.option import FsdpSpec
from quorate.strategies.gangs.shard_units import units_of
from quorate.strategies.gangs.tensor_parallel import parallelize
from quorate.strategies.gangs.tensor_plan import TensorPlan, plan_tensors
from quorate.training.activation_checkpointing import checkpoint_activations
from vit import VisionTransformer

WIDTH, HEADS, LENGTH = 16, 4, 6


class Llama(nn.Module):
    """Query, key and value are maps of their own, with rotary embeddings, norms of heads, and a gated network."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(kv_heads) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(hidden.shape[1]), 1 / torch.arange(1, 3)).to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, angles.cos(), angles.sin())
        return hidden


class LlamaBlock(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm, self.head_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(size)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * size, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)
        self.kv_heads = kv_heads

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        read = self.norm(hidden)
        batch, length, _ = read.shape
        query = self.head_norm(self.q(read).view(batch, length, HEADS, -1).transpose(1, 2))
        key = self.head_norm(self.k(read).view(batch, length, self.kv_heads, -1).transpose(1, 2))
        value = self.v(read).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        seen = F.scaled_dot_product_attention(
            turned(query, cos, sin), turned(key, cos, sin), value, attn_mask=mask, enable_gqa=True
        )
        hidden = hidden + self.o(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        read = self.norm(hidden)
        added: torch.Tensor = hidden + self.down(F.silu(self.gate(read)) * self.up(read))
        return added


def turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = heads.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class Split(nn.Module):
    """nanoGPT's way: one map for query, key and value, split into three, attention written out, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(SplitBlock(dropout), SplitBlock(dropout))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.blocks(hidden)
        return given


class SplitAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        self.mask: torch.Tensor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        heads = (each.view(batch, length, HEADS, -1) for each in self.attend(hidden).split(width, dim=2))
        query, key, value = (each.transpose(1, 2) for each in heads)
        scores = query @ key.transpose(-2, -1) * (width // HEADS) ** -0.5
        seen = self.drop(scores.masked_fill(self.mask, float("-inf")).softmax(-1)) @ value
        merged: torch.Tensor = self.merge(seen.transpose(1, 2).contiguous().view(batch, length, width))
        return merged


class SplitBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), SplitAttention(dropout)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        given: torch.Tensor = hidden + self.network(self.norm(hidden))
        return given


class Gated(nn.Module):
    """One map for gate and value, in two blocks; then a table of tokens that is cut by hand, and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.Sequential(GatedBlock(), GatedBlock())
        self.score = nn.Linear(WIDTH, 40)
        self.score.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.score(self.blocks(self.embed(tokens)))
        return scores


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        value, gate = self.both(hidden).chunk(2, dim=-1)
        given: torch.Tensor = hidden + self.down(value * F.silu(gate))
        return given


class Odd(nn.Module):
    """What models do between two maps, or to them, that is easily done wrong where tensors are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(OddBlock(), OddBlock())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.blocks(hidden)
        return given


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.other, self.add = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.RMSNorm(WIDTH)
        self.widen, self.pool = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(4 * WIDTH, 2 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        # Query, key and value of each head lie together.
        heads = self.attend(input=hidden).view(batch, length, HEADS, -1).transpose(1, 2)
        seen = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1))
        hidden = hidden + self.merge(input=seen.transpose(1, 2).reshape(batch, length, width))
        # What two columns read is changed in between; a norm is over all columns; a number is read.
        read = hidden + 0
        frozen = self.frozen(read)
        read.mul_(2.0)
        both = self.norm(frozen * self.other(read))
        hidden = hidden + self.add(both * float(both.detach().abs().max()))
        # Masks lie in memory as tensors do; columns of two rows become those of one.
        wide = F.dropout(self.widen(hidden).transpose(1, 2), 0.3, self.training).transpose(1, 2)
        pooled: torch.Tensor = self.pool(wide.reshape(batch, length // 2, 4 * width))
        return hidden + pooled.reshape(batch, length, width)


def encoder(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (3, LENGTH))


def hidden() -> torch.Tensor:
    return torch.randn(3, LENGTH, WIDTH)


BY_HAND = {"embed": "row", "score": "column", "blocks.*.both": "column", "blocks.*.down": "row"}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], Any]] = {
    "gpt2": (lambda: Gpt2(40, LENGTH, WIDTH, HEADS, 2), tokens, "auto"),
    "gpt2-dropout": (lambda: Gpt2(40, LENGTH, WIDTH, HEADS, 2, dropout=0.3), tokens, "auto"),
    "bert": (lambda: Bert(40, LENGTH, WIDTH, HEADS, 2), tokens, "auto"),
    "vit": (lambda: VisionTransformer(8, 4, 10, WIDTH, HEADS, 2), lambda: torch.randn(3, 3, 8, 8), "auto"),
    "vit-dropout": (
        lambda: VisionTransformer(8, 4, 10, WIDTH, HEADS, 2, dropout=0.3),
        lambda: torch.randn(3, 3, 8, 8),
        "auto",
    ),
    "llama": (Llama, hidden, "auto"),
    "split": (Split, hidden, "auto"),
    "split-dropout": (lambda: Split(0.3), hidden, "auto"),
    "odd": (Odd, hidden, "auto"),
    "encoder": (encoder, hidden, "auto"),
    "encoder-dropout": (lambda: encoder(0.3), hidden, "auto"),
    "gated": (Gated, tokens, "auto"),
    "gated-by-hand": (Gated, tokens, BY_HAND),
    "heads-whole": (lambda: Split(), hidden, {"*.attend": "column", "*.merge": "column", "*.network.0": "row"}),
}


def planned(name: str, tensor: int) -> tuple[nn.Module, torch.Tensor, TensorPlan]:
    build, batch, patterns = MODELS[name]
    torch.manual_seed(1)
    model, given = build(), batch()
    with torch.no_grad():  # what begins as zero, such as biases and classifiers, would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model, given, plan_tensors(model, patterns, tensor, trace_flow(model, lambda: model(given)))


def result(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients, of two passes with the same random numbers as ever."""
    torch.manual_seed(2)
    model.zero_grad()
    for _ in range(2):
        output = model(batch)
        (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().sin().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return output.detach(), [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]


class Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, also those within DTensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        name = function._schema.name.partition("::")[2]
        if function.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.count[name] += 1
        return function(*arguments, **(named or {}))


def farthest(name: str, size: int) -> dict[str, Any]:
    """How far a cut model is from the whole one, at most; with `+shard`, half of the processes are shards."""
    name, _, is_sharded = name.partition("+")
    tensor = size // 2 if is_sharded else size
    model, batch, plan = planned(name, tensor)
    output, gradients = result(model, batch)
    whole = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("shard", "tensor"))
    parallelize(model, mesh["tensor"], plan)
    if is_sharded:
        checkpoint_activations(model, True)
        for unit in units_of(model, FsdpSpec(kind="fsdp")):
            fully_shard(model.get_submodule(unit), mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    again, theirs = result(model, batch)
    differences = [float((a - b).abs().max()) for a, b in zip([output, *gradients], [again, *theirs], strict=True)]
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    with Exchanges() as exchanges:
        model(batch)
    model.eval()
    with torch.no_grad():
        model(batch)
    scale = float(max(gradient.abs().max() for gradient in gradients))
    return {
        "difference": max(differences),
        "scale": scale,
        "held": local,
        "of": whole,
        "exchanges": exchanges.count,
    }


def main(rank: int, size: int, folder: Path, models: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    told = {name: farthest(name, size) for name in models}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
