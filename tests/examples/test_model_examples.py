"""The models of examples/models: their sizes, how they begin, and the same bits on any number of workers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bert import Bert
from examples.example_files import EXAMPLES, example
from gpt2 import Gpt2
from quorate.data.collate import collate
from quorate.spec.load import load_job
from quorate.task.source import load_task_type
from quorate.task.task import Task, configure
from resnet import Basic, Bottleneck, ResNet
from vit import VisionTransformer

JOBS = sorted((EXAMPLES / "models").glob("*.yaml"))
NOWHERE = "nowhere"  # so that the data is synthetic, whatever was fetched into data/
IMAGES = {"data": NOWHERE, "side": 32, "classes": 7, "synthetic": 64}
TINY: dict[str, dict[str, Any]] = {
    "resnet18": {**IMAGES, "width": 4},
    "resnet50": {**IMAGES, "width": 4},
    "cifar_resnet18": {"data": NOWHERE, "width": 4},
    "vit_b16": {**IMAGES, "width": 16, "heads": 2, "layers": 2},
    "gpt2": {"data": NOWHERE, "vocabulary": 100, "window": 12, "width": 16, "heads": 2, "layers": 2},
    "bert_large": {"data": NOWHERE, "vocabulary": 100, "window": 20, "width": 16, "heads": 2, "layers": 2},
}
CLASSES = {"cifar_resnet18": 10, "gpt2": 128, "bert_large": 128}
"""What there is to choose from, where it is not 7; of vocabularies with their padding."""


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tiny(name: str) -> Task:
    task_type, spec = example(f"models/{name}", TINY[name])
    return configure(task_type, spec.params, "the test", spec.seed)


# --- sizes


SIZES = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize(("depth", "parameters"), SIZES.items())
def test_residual_networks_have_the_published_size(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(ResNet(depth, 1000)) == parameters


def test_the_stem_for_small_images_keeps_their_size() -> None:
    with torch.device("meta"):
        small, usual = ResNet(18, 10, small_images=True), ResNet(18, 10)
        images = torch.empty(1, 3, 32, 32)
        assert small.stem(images).shape == (1, 64, 32, 32)
        assert small.blocks(small.stem(images)).shape == (1, 512, 4, 4)
        assert usual.stem(images).shape == (1, 64, 8, 8)


def test_the_vision_transformer_has_the_published_size() -> None:
    with torch.device("meta"):
        assert count(VisionTransformer(224, 16, 1000, width=768, heads=12, layers=12)) == 86_567_656


def test_gpt2_has_the_published_size_and_47_rows_of_padding() -> None:
    with torch.device("meta"):
        plain, widened = task_with("gpt2", pad_vocabulary=False).model(), task_with("gpt2").model()
    assert count(plain) == 124_439_808
    assert count(widened) == 124_439_808 + 47 * 768
    assert widened.get_parameter("embed.weight").shape == (50_304, 768)


def test_the_large_shape_of_gpt2_has_a_billion() -> None:
    with torch.device("meta"):
        assert count(task_with("gpt2_1b", pad_vocabulary=False).model()) == 1_011_572_736 - 47 * 2048


def test_bert_large_has_the_published_size() -> None:
    with torch.device("meta"):
        model = task_with("bert_large", pad_vocabulary=False).model()
        assert count(task_with("bert_large").model()) == 335_174_458 + 6 * (1024 + 1)
    assert isinstance(model.blocks, nn.Module)
    assert count(model.blocks) == 302_309_376
    # The published 335,141,888 have a pooler and no head that foretells tokens.
    pooler, head = 1024 * 1024 + 1024, 1024 * 1024 + 1024 + 2 * 1024 + 30_522
    assert count(model) == 335_141_888 - pooler + head == 335_174_458


def task_with(name: str, **params: Any) -> Task:
    task_type, spec = example(f"models/{name}", params)
    return configure(task_type, spec.params, "the test", spec.seed)


# --- jobs


@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job.stem))
def test_every_job_file_is_valid_and_its_task_takes_its_parameters(job: Path) -> None:
    spec = load_job(job, {}, []).spec
    assert spec.name.replace("-", "_") == job.stem
    task = configure(load_task_type(spec.task, spec.seed), spec.params, str(job), spec.seed)
    with torch.device("meta"):
        assert count(task.model()) > 10**7


@pytest.mark.parametrize("name", TINY)
def test_data_that_is_not_there_is_made_up_and_that_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    task = tiny(name)
    training, validation = task.datasets()
    (told,) = caplog.messages
    assert told.startswith(f"There is no folder {EXAMPLES / 'models' / NOWHERE} (params.data): training on ")
    assert len(training) >= 64 and len(validation) >= 64
    again, _ = tiny(name).datasets()
    for index in (0, 1, len(training) - 1):
        for one, other in zip(training[index], again[index], strict=True):
            assert torch.equal(one, other), "the same in every worker"
    assert not torch.equal(training[0][0], training[1][0])
    assert not torch.equal(training[0][0], validation[0][0]), "what is evaluated is not what was trained on"


# --- the first steps


@pytest.mark.parametrize("name", TINY)
def test_at_first_all_classes_are_about_as_likely_and_gradients_are_finite(name: str) -> None:
    torch.manual_seed(1)
    task = tiny(name)
    model = task.model()
    training, _ = task.datasets()
    loss = task.loss(model, collate([training[index] for index in range(16)]))
    assert loss.item() == pytest.approx(math.log(CLASSES.get(name, 7)), abs=0.1)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    optimizer = task.optimizer(model)
    handled = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(handled) == len({id(parameter) for parameter in handled}) == len(gradients)


@pytest.mark.parametrize("name", TINY)
def test_a_loss_is_computed_where_model_and_batch_are(name: str) -> None:
    task = tiny(name)
    training, _ = task.datasets()
    model, batch = task.model().to("meta"), [part.to("meta") for part in collate([training[0], training[1]])]
    # A tensor of the host's memory among those of the other device would be an error.
    assert task.loss(model, batch).device.type == "meta"
    assert {value.device.type for value in task.metrics(model, batch).values()} == {"meta"}


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", TINY)
def test_one_worker_and_two_give_one_digest(name: str, tmp_path: Path) -> None:
    ends = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        task_type, spec = example(
            f"models/{name}", TINY[name], lanes=2, batch_size=8, steps=3, evaluate={"every": 3, "batch_size": 500}
        )
        ends.append(gang.train(task_type, spec, workers, folder))
    assert ends[0].digest == ends[1].digest
    assert ends[0].progress == ends[1].progress, "metrics must be equal too, to the last bit"
    assert len(set(ends[0].losses)) == 3, "it was trained"


# --- how weights begin


@pytest.mark.parametrize("block", [Basic(8, 8, 1), Bottleneck(32, 8, 1)], ids=["basic", "bottleneck"])
def test_residual_blocks_begin_as_the_identity(block: Basic | Bottleneck) -> None:
    images = torch.rand(2, 8 * block.expansion, 6, 6)
    assert torch.equal(block(images), images)


def test_the_classifier_of_the_vision_transformer_begins_at_zero() -> None:
    model = VisionTransformer(32, 16, 5, width=16, heads=2, layers=1)
    assert torch.equal(model(torch.rand(2, 3, 32, 32)), torch.zeros(2, 5))


def test_what_blocks_of_gpt2_add_begins_smaller_the_deeper_it_is() -> None:
    torch.manual_seed(1)
    model = Gpt2(100, 8, width=128, heads=2, layers=8)
    for name, parameter in model.blocks.named_parameters():
        if name.endswith(("merge.weight", "narrow.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        elif parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)


def test_weights_of_bert_begin_within_two_deviations() -> None:
    torch.manual_seed(1)
    model = Bert(100, 8, width=64, heads=2, layers=1)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert len(matrices) == 3 + 4 + 1
    assert all(matrix.abs().max() <= 0.04 for matrix in matrices)
    assert model.embed.weight.std().item() == pytest.approx(0.02 * 0.88, rel=0.05), "cut off, it is a little narrower"


# --- what they may look at


def test_gpt2_foretells_a_token_from_those_before_it_only() -> None:
    model = Gpt2(100, 12, width=16, heads=2, layers=2)
    tokens = torch.randint(0, 100, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 100
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_bert_looks_both_ways() -> None:
    model = Bert(100, 12, width=16, heads=2, layers=2)
    tokens = torch.randint(0, 100, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 100
    difference = (model(tokens) - model(changed)).abs().amax(-1)
    assert (difference > 0).all()


@pytest.mark.parametrize("name", ["gpt2", "bert_large"])
def test_one_table_reads_tokens_and_foretells_them(name: str) -> None:
    model: Any = tiny(name).model()
    assert model.score.weight is model.embed.weight


def test_dropout_is_off_unless_it_is_asked_for() -> None:
    for name in ("vit_b16", "gpt2", "bert_large"):
        assert all(module.p == 0 for module in tiny(name).model().modules() if isinstance(module, nn.Dropout))
    tokens = torch.randint(0, 100, (2, 12))
    for model_type in (Gpt2, Bert):
        model = model_type(100, 12, width=16, heads=2, layers=2, dropout=0.5)
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gpt2(10, 8, width=16, heads=3, layers=1), "a width of 16 cannot be shared equally by 3 heads"),
        (lambda: Bert(10, 8, width=16, heads=3, layers=1), "a width of 16 cannot be shared equally by 3 heads"),
        (lambda: VisionTransformer(32, 16, 5, 16, 3, 1), "a width of 16 cannot be shared equally by 3 heads"),
        (lambda: VisionTransformer(30, 16, 5, 16, 2, 1), "patches of 16 pixels do not fill a side of 30"),
    ],
    ids=["gpt2", "bert", "vit", "patches"],
)
def test_shapes_that_do_not_fit_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
