"""What to do about exceptions that beginners meet, in whatever part of their code: surely right, or nothing."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from quorate.core.debugger import REMEDY


def first_aid(error: BaseException) -> str:
    """What to do about an exception of a user's code; nothing for one that speaks for itself."""
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        return _no_file(error.filename)
    for pattern, say in _REMEDIES:
        found = re.search(pattern, f"{type(error).__name__}: {error}", re.IGNORECASE)
        if found is not None:
            return say(found) if callable(say) else say
    return ""


def _no_file(name: str) -> str:
    if Path(name).is_absolute():
        return "Fix the path, or make it one of the job's `params`."
    # A run that is resumed elsewhere: it was begun in the folder of the task most often, or in the one above.
    near = (folder for entry in sys.path for folder in (Path(entry), Path(entry).parent))
    there = next((f", and there is one in {folder.absolute()}" for folder in near if (folder / name).exists()), "")
    return (
        f"A relative path counts from where the command is given, here {Path.cwd()}{there}. Make it "
        f'Path(__file__).parent / "{name}" to find it beside the task.'
    )


def _no_module(found: re.Match[str]) -> str:
    name = found[1].partition(".")[0]
    return f"Is {name} misspelt? Otherwise install it: pip install {name}. A module of your own lies beside the task."


_Say = str | Callable[[re.Match[str]], str]

_REMEDIES: tuple[tuple[str, _Say], ...] = (
    (r"^BdbQuit", REMEDY),
    (
        r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device|"
        r"Attempting to deserialize object on a CUDA device",
        'There is no GPU here that this job uses. Leave out .cuda() and .to("cuda"): model and batches are put on the '
        "job's device (`device`) as they are; a tensor made in loss() is put beside others with device=batch.device.",
    ),
    (
        r"element 0 of tensors does not require grad",
        "If that is a backward() in loss() or metrics(), leave it out: Quorate calls it for what loss() returns.",
    ),
    (r"^ModuleNotFoundError: No module named '([^']+)'", _no_module),
    (
        r"before Module\.__init__\(\) call",
        "Call super().__init__() first, in the __init__ of the model.",
    ),
    (
        r"^(TabError|IndentationError)",
        "Indent with four spaces, and never with tabs.",
    ),
    (
        r"^SyntaxError",
        "Fix the line that is named below; often the mistake is at its end, or in the line before.",
    ),
)
