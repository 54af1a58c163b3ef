"""The small GPT: its bits on any number of workers, what it reads, what it may look at, and what it writes."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
import quorate
from command import Workplace
from examples.example_files import EXAMPLES, ROOT, example, module_of

shakespeare: Any = module_of(EXAMPLES / "shakespeare.py")

SMALL = {"window": 12, "width": 16, "heads": 2, "layers": 2}
TEXT = "To be, or not to be: that is the question.\n" * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def model() -> Any:
    torch.manual_seed(1)
    return shakespeare.Gpt(window=12, width=16, heads=2, layers=2)


def task_with(**params: Any) -> Any:
    task = shakespeare.Shakespeare()
    for name, value in params.items():
        setattr(task, name, value)
    return task


# --- training


def trained(folder: Path, text: Path, workers: int, **keys: Any) -> gang.Ended:
    task, spec = example(
        "shakespeare",
        {"text": str(text), "learning_rate": 0.02, **SMALL},
        steps=30,
        schedule=None,
        evaluate={"every": 15},
        **keys,
    )
    folder.mkdir()
    return gang.train(task, spec, workers, folder)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.long
def test_any_number_of_workers_gives_one_digest_and_the_model_learns(text: Path, tmp_path: Path) -> None:
    ends = [trained(tmp_path / str(workers), text, workers) for workers in (1, 2, 3)]
    assert len({end.digest for end in ends}) == 1
    assert all(end.progress == ends[0].progress for end in ends), "metrics must be equal too, to the last bit"
    assert trained(tmp_path / "other", text, 2, seed=8).digest != ends[0].digest, "the digest tells models apart"
    first, last = ends[0].losses[0], ends[0].losses[-1]
    assert first == pytest.approx(math.log(256), abs=0.5), "a mean over characters: at first all are about as likely"
    assert last < first / 2


def test_what_is_held_out_is_not_trained_on(text: Path) -> None:
    training, validation = task_with(text=text, window=12).datasets()
    assert len(training) == len(TEXT) * 0.95 - 12
    read = b"".join(bytes(validation[index][:-1].tolist()) for index in range(len(validation)))
    whole, last = bytes(training[0].tolist()), bytes(training[len(training) - 1].tolist())
    assert TEXT.encode().startswith(whole)
    assert TEXT.encode().endswith(last + read + TEXT.encode()[-(len(TEXT) // 20 - len(read)) :])
    assert {len(validation[index]) for index in range(len(validation))} == {13}


def test_a_character_is_foretold_from_those_before_it_only(model: Any) -> None:
    characters = torch.randint(0, 256, (1, 12))
    changed = characters.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(characters), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_one_table_reads_characters_and_foretells_them(model: Any) -> None:
    assert model.score.weight is model.embed.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embed.weight" in names
    assert "score.weight" not in names


# --- what it says


def test_a_missing_text_is_named_and_the_command_that_fetches_it_exists(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(quorate.RequestError) as caught:
        task_with(text=missing).datasets()
    assert caught.value.message.startswith(f"There is no text {missing} (params.text;")
    assert f"a relative path counts from {EXAMPLES}" in caught.value.message
    command = re.search(r"python (\S+) (\S+)", caught.value.message)
    assert command is not None
    assert command[2] in module_of(ROOT / command[1]).DATASETS


@pytest.mark.parametrize("length", [0, 1, 96, 1000, 1939])
def test_a_text_that_is_too_short_is_told_with_its_numbers(length: int, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * length)
    with pytest.raises(quorate.RequestError) as caught:
        task_with(text=file).datasets()
    assert f"{file} has {length:,} characters, of which {length // 20:,} are held out" in caught.value.message
    assert "params.window: 96" in caught.value.message


def test_the_shortest_text_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("x" * 1940)
    assert [len(part) for part in task_with(text=file).datasets()] == [1843 - 96, 1]


def test_a_width_that_the_heads_cannot_share() -> None:
    with pytest.raises(quorate.RequestError, match=r"width \(96\) .*heads \(5\).*--set params.width=100$"):
        task_with(heads=5).model()


# --- writing


def test_the_same_seed_writes_the_same_text(model: Any) -> None:
    one, again, other = (shakespeare.write(model, "To be", 40, 0.8, seed) for seed in (3, 3, 4))
    assert one == again != other
    assert one.startswith("To be")


def test_without_temperature_the_seed_does_not_matter(model: Any) -> None:
    assert shakespeare.write(model, "To be", 40, 0, 3) == shakespeare.write(model, "To be", 40, 0, 4)


@pytest.mark.parametrize("prompt", ["", "o", "longer than the window that it sees", "déjà vu"])
def test_any_prompt_is_gone_on_from(prompt: str, model: Any) -> None:
    with torch.no_grad():
        model.embed.weight[ord("e")] += 100  # so that nothing else is written: its scores are far above the others
        model.norm.bias += 100
    assert shakespeare.write(model, prompt, 5, 0.8, 1) == (prompt or "\n") + "eeeee"


@pytest.mark.usefixtures("unmeasured")
def test_a_trained_run_writes_without_its_text(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    text = workplace.folder / "text.txt"
    text.write_text(TEXT)
    params = {"text": text, **SMALL}
    settings = [word for name, value in params.items() for word in ("--set", f"params.{name}={value}")]
    runs = str(workplace.folder / "runs")
    job = str(EXAMPLES / "shakespeare.yaml")
    done = workplace.run("train", job, *settings, "--steps", "5", "--workers", "1", "--runs", runs)
    assert done.code == 0, done.stderr
    text.unlink()
    arguments = ["last", "--runs", runs, "--prompt", "Words, ", "--length", "30", "--seed", "4"]
    assert shakespeare.main(arguments) == 0
    model = quorate.open_run("last", runs).load_model()
    assert capsys.readouterr().out == shakespeare.write(model, "Words, ", 30, 0.8, 4) + "\n"


def test_a_run_of_another_task_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shakespeare.main(["tiny-0001", "--runs", str(finished / "runs")]) == 2
    assert capsys.readouterr().err.startswith("error: Run tiny-0001 trained a Sequential, which cannot write.")


def test_a_run_that_does_not_exist_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shakespeare.main(["tiny-0099", "--runs", str(finished / "runs")]) == 2
    assert "tiny-0099" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--length=0", "--length=many", "--temperature=-1", "--temperature=nan"])
def test_wrong_arguments_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        shakespeare.main([argument])
    assert ended.value.code == 2
    assert argument.partition("=")[0] in capsys.readouterr().err
