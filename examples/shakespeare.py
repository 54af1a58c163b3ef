"""Shakespeare, one character after the other: a small GPT that learns to spell, and what a play looks like.

::

    python scripts/datasets.py shakespeare            # fetches the works into data/shakespeare
    quorate train examples/shakespeare.yaml
    python examples/shakespeare.py last --prompt "ROMEO." --length 300

Any text will do: `params.text` names the file. A relative path counts from the folder of this file, as `task` counts
from that of the job file. A character is a byte, so the model does not depend on the text: a run can write without it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import quorate

CHARACTERS = 256
HELD_OUT = 0.05
HOW_TO_GET_IT = """To fetch all works of Shakespeare into data/shakespeare:
  python scripts/datasets.py shakespeare
Any other text will do, with --set params.text=FILE"""


class Shakespeare(quorate.Task):
    text: Path = Path("../data/shakespeare/shakespeare.txt")
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    window: int = 96
    width: int = 96
    heads: int = 4
    layers: int = 3

    def model(self) -> nn.Module:
        if self.width % self.heads:
            raise quorate.RequestError(
                f"params.width ({self.width}) is not a multiple of params.heads ({self.heads}), which share it "
                f"equally. Try --set params.width={-(-self.width // self.heads) * self.heads}"
            )
        return Gpt(self.window, self.width, self.heads, self.layers)

    def datasets(self) -> tuple["Windows", "Windows"]:
        file = (Path(__file__).parent / self.text.expanduser()).resolve()
        characters = read_text(file)
        # The end of the text is held out, rather than windows from all over it: those overlap with what is trained on.
        held_out = int(HELD_OUT * len(characters))
        training, rest = characters[: len(characters) - held_out], characters[len(characters) - held_out :]
        if held_out <= self.window:
            raise quorate.RequestError(
                f"{file} has {len(characters):,} characters, of which {held_out:,} are held out: too few for a window "
                f"and what follows it (params.window: {self.window}). Take a longer text, or a smaller window."
            )
        return Windows(training, self.window, stride=1), Windows(rest, self.window, stride=self.window)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        read, follows = batch[:, :-1].long(), batch[:, 1:].long()
        total = F.cross_entropy(model(read).flatten(0, 1), follows.flatten(), reduction="sum")
        return total, follows.numel()  # (sum, count): a mean over characters

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.98))


class Windows:
    """Pieces of a text, each one character longer than what the model reads: the last one is only foretold."""

    def __init__(self, characters: torch.Tensor, window: int, stride: int) -> None:
        self._characters = characters
        self._window = window
        self._stride = stride

    def __len__(self) -> int:
        return max(0, (len(self._characters) - self._window - 1) // self._stride + 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._stride
        return self._characters[start : start + self._window + 1]


class Gpt(nn.Module):
    """Embeds characters and their places, passes them through the blocks, and scores what follows each of them."""

    def __init__(self, window: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.window = window
        self.embed = nn.Embedding(CHARACTERS, width)
        self.place = nn.Parameter(torch.zeros(window, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, CHARACTERS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place, std=0.02)
        self.score.weight = self.embed.weight  # tied: one table reads characters and foretells them

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(characters) + self.place[: characters.shape[1]]
        scores: torch.Tensor = self.score(self.norm(self.blocks(hidden)))
        return scores


class Block(nn.Module):
    """Attention to what came before, then a small network for each place; each reads a normalised copy."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attention(self.attention_norm(hidden))
        added: torch.Tensor = self.network(self.network_norm(hidden))
        return hidden + added

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.attend(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: torch.Tensor = self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return merged


def read_text(file: Path) -> torch.Tensor:
    if not file.is_file():
        raise quorate.RequestError(
            f"There is no text {file} (params.text; a relative path counts from {Path(__file__).parent}).\n"
            f"{HOW_TO_GET_IT}"
        )
    return torch.from_numpy(numpy.fromfile(file, numpy.uint8))


@torch.no_grad()
def write(model: Gpt, prompt: str, length: int, temperature: float, seed: int) -> str:
    """Go on from the prompt for so many characters. Temperature 0 takes the likeliest each time."""
    generator = torch.Generator().manual_seed(seed)
    characters = torch.tensor([list(prompt.encode() or b"\n")])
    model.eval()
    for _ in range(length):
        scores = model(characters[:, -model.window :])[:, -1]
        if temperature == 0:
            following = scores.argmax(-1, keepdim=True)
        else:
            following = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
        characters = torch.cat([characters, following], dim=1)
    return bytes(characters[0].tolist()).decode(errors="replace")


def load(run: str, runs: str) -> Gpt:
    """The model of a run."""
    result = quorate.open_run(run, runs)
    model = result.load_model()
    # By name: the task's file is imported by the run, and here it is the script itself.
    if type(model).__name__ != Gpt.__name__:
        raise quorate.RequestError(
            f"Run {result.run} trained a {type(model).__name__}, which cannot write. Name a run of "
            "examples/shakespeare.yaml; `quorate runs` lists the runs."
        )
    trained: Gpt = model
    return trained


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def warmth(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Let a trained model write; the exit code."""
    parser = argparse.ArgumentParser(description="Let a trained model write.")
    parser.add_argument("run", nargs="?", default="last", help="its name, a unique prefix of it, its path, or last")
    parser.add_argument("--prompt", default="\n", help="what to go on from")
    parser.add_argument("--length", type=count, default=400, help="how many characters to add (default: 400)")
    parser.add_argument("--temperature", type=warmth, default=0.8, help="0 dares nothing (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text (default: 0)")
    parser.add_argument("--runs", default="runs", help="the folder of run folders (default: runs)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # with more threads other bits, and a text that differs from machine to machine
    try:
        print(write(load(given.run, given.runs), given.prompt, given.length, given.temperature, given.seed))
    except quorate.QuorateError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
