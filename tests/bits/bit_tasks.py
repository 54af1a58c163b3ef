"""Small tasks, each with something that makes bits depend on the number of workers where it is done carelessly."""

import itertools
import random
import tempfile
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import quorate

SAMPLES = 50
FEATURES = 6


class Points:
    """Points on several scales, so that the order of additions shows in the last bits."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        scale = 10 ** torch.linspace(-3, 3, FEATURES)
        self.inputs = torch.randn(samples, FEATURES, generator=generator) * scale
        self.targets = torch.randn(samples, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class NoisyPoints(Points):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        noise = torch.rand(FEATURES) + float(numpy.random.rand()) + random.random()
        return inputs * noise, target


class Regression(quorate.Task):
    """The plainest task; the others differ from it in one respect."""

    learning_rate: float = 1e-3

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, 1))

    def datasets(self) -> Any:
        return Points(), Points(21)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return F.mse_loss(model(inputs).squeeze(-1), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)


class Momentum(Regression):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9, nesterov=True)


class Adam(Regression):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate)


class BatchNormAndDropout(Momentum):
    def model(self) -> nn.Module:
        # Two channels of four places each: a lane with a single sample still has a variance.
        normed = [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten()]
        return nn.Sequential(nn.Linear(FEATURES, 8), *normed, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


class TinyTransformer(quorate.Task):
    """Tied weights, a causal mask of finfo.min as a buffer, AdamW, a mean over tokens."""

    tokens: int = 13
    length: int = 7

    def model(self) -> nn.Module:
        return _Transformer(self.tokens, self.length)

    def datasets(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        texts = torch.randint(1, self.tokens, (SAMPLES, self.length + 1), generator=generator)
        lengths = torch.randint(2, self.length + 1, (SAMPLES,), generator=generator)
        texts[torch.arange(self.length + 1) > lengths[:, None]] = 0
        return list(texts), list(texts[:10])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total = F.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0, reduction="sum"
        )
        return total, (batch[:, 1:] != 0).sum()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class _Transformer(nn.Module):
    mask: torch.Tensor

    def __init__(self, tokens: int, length: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.1)
        self.attend = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, tokens, bias=False)
        self.out.weight = self.embed.weight
        mask = torch.triu(torch.full((length, length), torch.finfo(torch.float32).min), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.place
        query, key, value = self.attend(self.norm(hidden)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) + self.mask
        out: torch.Tensor = self.out(self.drop(hidden + scores.softmax(-1) @ value))
        return out


class FrozenAndUnused(Regression):
    """AdamW decays a parameter whose gradient is zero, but not one whose gradient is None."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"used": nn.Linear(FEATURES, 1), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
        model["frozen"].requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        assert isinstance(model, nn.ModuleDict)
        return F.mse_loss(model["used"](inputs).squeeze(-1), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


class WithoutOptimizer(Momentum):
    """A parameter that has gradients and no optimizer, one without elements, and one without a dimension."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
        model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
        return model

    def optimizer(self, model: nn.Module) -> Any:
        trained = [parameter for name, parameter in model.named_parameters() if name != "2.weight"]
        return torch.optim.SGD(trained, lr=self.learning_rate, momentum=0.9)


class NothingOfItsType(WithoutOptimizer):
    """A parameter without elements is alone in its type, and so in its bucket."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("wide", nn.Parameter(torch.empty(0, dtype=torch.float64)))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) + model.get_parameter("wide").sum().float()


class SometimesUsed(Regression):
    """A parameter that gets a gradient in some lanes only."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"always": nn.Linear(FEATURES, 1), "rarely": nn.Linear(FEATURES, 1)})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        assert isinstance(model, nn.ModuleDict)
        part = "rarely" if targets[0] > 0.8 else "always"
        return F.mse_loss(model[part](inputs).squeeze(-1), targets)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


class RandomTransform(Regression):
    def datasets(self) -> Any:
        return NoisyPoints(), NoisyPoints(21)


class TwoOptimizers(quorate.Task):
    """A tiny GAN: each loss must move its own network only."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"make": nn.Linear(2, FEATURES), "judge": nn.Linear(FEATURES, 1)})

    def datasets(self) -> Any:
        return Points()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        real, _ = batch
        assert isinstance(model, nn.ModuleDict)
        made = model["make"](torch.randn(len(real), 2))
        judge_made, judge_real = model["judge"](made), model["judge"](real)
        ones, zeros = torch.ones_like(judge_made), torch.zeros_like(judge_made)
        return {
            "make": F.binary_cross_entropy_with_logits(judge_made, ones),
            "judge": F.binary_cross_entropy_with_logits(judge_real, ones)
            + F.binary_cross_entropy_with_logits(judge_made, zeros),
        }

    def optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, nn.ModuleDict)
        return {
            "make": torch.optim.Adam(model["make"].parameters(), lr=1e-2),
            "judge": torch.optim.SGD(model["judge"].parameters(), lr=1e-3, momentum=0.5),
        }


class NoisySgd(torch.optim.SGD):
    """Draws from torch's, NumPy's and Python's generators at every step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter) * 1e-3 * float(numpy.random.rand()) * random.random())
        return super().step(closure)


class NoisyOptimizer(Regression):
    def optimizer(self, model: nn.Module) -> Any:
        return NoisySgd(model.parameters(), lr=self.learning_rate)


class _WithBuffers(nn.Module):
    constant: torch.Tensor
    count: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.register_buffer("constant", torch.rand(31) * 1e-3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.rand(17))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.table = torch.full_like(self.table, 0.1) * self.count
        scaled: torch.Tensor = self.linear(inputs) * (1 + self.constant.mean())
        return scaled


class ConstantBuffers(Regression):
    """Buffers that are equal in all lanes: one never written, one counted up, one made anew at each step."""

    learning_rate: float = 1e-8

    def model(self) -> nn.Module:
        return _WithBuffers()


class IndexBackward(quorate.Task):
    """The backward pass of indexing adds into the same rows from several threads."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"rows": nn.Embedding(8, 256), "out": nn.Linear(256, 1)})

    def datasets(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return list(torch.randint(0, 8, (SAMPLES, 600), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        weight = model["rows"].weight
        assert isinstance(weight, torch.Tensor)
        rows = weight[batch.flatten()]
        return model["out"](rows.view(*batch.shape, -1).sum(1)).square().mean()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-7)


class LaneZeroBuffer(Regression):
    """A buffer that differs between lanes, with a rule."""

    learning_rate: float = 1e-8
    buffer_rules: ClassVar[Mapping[str, str]] = {"table": "lane 0"}

    def model(self) -> nn.Module:
        return _Remembers()


class _Remembers(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.register_buffer("table", torch.zeros(FEATURES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.table = self.table * 0.9 + inputs.mean(0)
        remembered: torch.Tensor = self.linear(inputs + 1e-3 * self.table)
        return remembered


class UnruledBuffer(LaneZeroBuffer):
    buffer_rules: ClassVar[Mapping[str, str]] = {}


class DrawsWhileBuilding(Regression):
    """Random data, a random learning rate: whatever a task draws while it is built has a seed."""

    def __init__(self) -> None:
        self.scale = random.random()

    def datasets(self) -> Any:
        shift = self.scale + torch.rand(1) + float(numpy.random.rand()) + random.random()
        points = Points()
        points.targets += shift
        return points

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-4 * random.random())


class NAdamInFloat64(Regression):
    """Keeps a float32 product of its own; torch casts it to float64 when it loads a state."""

    def model(self) -> nn.Module:
        return super().model().double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return F.mse_loss(model(inputs.double()).squeeze(-1), targets.double())

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.NAdam(model.parameters(), lr=1e-3)


class MultiStep(Momentum):
    """A scheduler whose state holds a Counter."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5)


class Plateau(Momentum):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


class BestAtStepFour(Regression):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("trained", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            model.get_buffer("trained").add_(1)
        return super().loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"steps": abs(float(model.get_buffer("trained")) - 4)}


class LeavesEvaluationMode(BatchNormAndDropout):
    """What a lane does to the modes of the model must not reach the next lane."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        model.eval()
        return loss


class KeepsItsModel(Regression):
    """A task may hold on to what it built."""

    def model(self) -> nn.Module:
        self._net = super().model()
        return self._net

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(self._net, batch)


class WorksInPlace(Regression):
    """Hands out the dataset's own tensors and changes them."""

    def collate(self, samples: Any) -> Any:
        return list(samples)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        for inputs, _ in batch:
            inputs.mul_(0.9)
        inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
        return super().loss(model, (inputs, targets))


class LinesOfAFile:
    """Opens its file when it is first read, as one does so that each loader process has its own."""

    def __init__(self) -> None:
        self._file: Any = None
        path = Path(tempfile.mkdtemp()) / "points.txt"
        path.write_text("".join(f"{index:06d}\n" for index in range(4000)))
        self._path = path

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        self._file.seek(index * 7)
        value = torch.tensor(float(self._file.read(7)) / 4000)
        return value.expand(FEATURES), value


class LazyFile(Regression):
    def datasets(self) -> Any:
        return LinesOfAFile()


class _Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.first, self.second = _Holder(), _Holder()
        self.second.register_buffer("table", self.first.table)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.second.table.mul_(0.5).add_(inputs.mean())
        out: torch.Tensor = self.linear(inputs) + 1e-3 * self.first.table.mean()
        return out


class _Holder(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))


class SharedBuffer(Regression):
    """One buffer registered in two modules, changed through the second."""

    buffer_rules: ClassVar[Mapping[str, str]] = {"first.table": "mean"}
    learning_rate: float = 1e-8

    def model(self) -> nn.Module:
        return _Shares()


class RefinesLater(Regression):
    """What a lane assigns must not reach the lanes that happen to share its process, nor may a cache made of it."""

    def __init__(self) -> None:
        self.refine = False
        self.limit = float("nan")

    def model(self) -> nn.Module:
        return _Caches()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if loss.item() < 1.0:
            self.refine = True
        assert isinstance(model, _Caches)
        return loss * (0.5 if self.refine else 1.0) + 1e-3 * model.aux_loss + sum(model.parts)


class _Caches(nn.Module):
    """Caches that are built when first needed, by name, in a dict and as a property; losses that are kept aside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.scale: torch.Tensor | None = None
        self.tables: dict[int, torch.Tensor] = {}
        self.parts: list[torch.Tensor] = []

    @cached_property
    def offset(self) -> torch.Tensor:
        return self.linear.weight.detach().mean()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = inputs.detach().abs().mean() * 1e-6
        if len(inputs) not in self.tables:
            self.tables[len(inputs)] = inputs.detach().mean(1, keepdim=True) * 1e-6
        self.aux_loss = self.linear.weight.square().sum()
        self.parts.append(self.aux_loss * 1e-3)
        out: torch.Tensor = self.linear(inputs) * (1 + self.scale) + self.tables[len(inputs)] + self.offset
        return out


class NormedWeights(Regression):
    """Weights that torch computes anew before each forward pass: by hooks of old, and by parametrizations."""

    def model(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            old = [torch.nn.utils.weight_norm(nn.Linear(FEATURES, 6)), torch.nn.utils.spectral_norm(nn.Linear(6, 6))]
            recurrent = torch.nn.utils.weight_norm(_OwnLstm(6, 6), "weight_hh_l0")
        parametrizations = torch.nn.utils.parametrizations
        new = [parametrizations.weight_norm(nn.Linear(6, 6)), parametrizations.spectral_norm(nn.Linear(6, 1))]
        return _Chain(*old, recurrent, *new)


class _OwnLstm(nn.LSTM):
    """Torch keeps a list of the weights in it, whoever's class it is."""


class _Chain(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self:
            inputs = layer(inputs)[0] if isinstance(layer, nn.LSTM) else layer(inputs)
        return inputs


class RunningMean(Plateau):
    """A metric of all batches that this process has seen would drive the rate, and so depend on the process."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        self.total += self.loss(model, batch).item()
        self.count += 1
        model.train()
        return {"loss": self.total / self.count}


class AveragesInside(BatchNormAndDropout):
    """A hook of the optimizer moves an average that is part of the model: parameters, buffers and a count."""

    def model(self) -> nn.Module:
        net = super().model()
        blend = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        return nn.ModuleDict({"net": net, "average": AveragedModel(net, multi_avg_fn=blend)})

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(model, nn.ModuleDict)
        return super().loss(model["net"], batch)

    def optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, nn.ModuleDict)
        net, average = model["net"], model["average"]
        assert isinstance(average, AveragedModel)
        optimizer = torch.optim.SGD(net.parameters(), lr=self.learning_rate, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(net))
        return optimizer


class ScheduledLoss(Momentum):
    """The function of a torch schedule changes the model: what it leaves must be found by every lane, not just the
    first of each worker."""

    def model(self) -> nn.Module:
        self._net = super().model()
        self._net.register_buffer("progress", torch.zeros(()))
        return self._net

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + model.get_buffer("progress"))

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)

    def rate(self, step: int) -> float:
        self._net.get_buffer("progress").fill_(step / 10)
        return 1 - step / 10


class CountsInCollate(Regression):
    """What collate() assigns is seen by metrics() only where it runs in the same process."""

    batches: int = 0

    def collate(self, samples: Any) -> Any:
        self.batches += 1
        return super().collate(samples)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"batches": self.batches}


class Streamed(Regression):
    """Reads in order: each lane from an iterator of its own, which draws from the global generators."""

    def datasets(self) -> Any:
        return quorate.Stream(self.read, samples=70), Points(21)

    def read(self, epoch: int, shard: int, shards: int) -> Any:
        held: list[float] = []
        for position in itertools.count():
            held.append(epoch + shard / shards + position / 100)
            inputs = torch.randn(FEATURES) + held.pop(random.randrange(len(held))) + torch.rand(1)
            yield inputs, inputs.sum()


class Bookmarked(Streamed):
    """The same of an iterator that can be continued."""

    def read(self, epoch: int, shard: int, shards: int) -> Any:
        return Counting(epoch + shard / shards)


class Counting:
    """Counts in a state of its own."""

    def __init__(self, begin: float) -> None:
        self.begin, self.position = begin, 0

    def __iter__(self) -> "Counting":
        return self

    def __next__(self) -> Any:
        self.position += 1
        inputs = torch.randn(FEATURES) + self.begin + self.position
        return inputs, inputs.sum()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
