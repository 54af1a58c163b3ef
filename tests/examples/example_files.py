"""The examples' files, and small data in the formats that they read."""

import gzip
import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quorate.spec.job import JobSpec
from quorate.spec.load import load_job
from quorate.task.source import load_task_type
from quorate.task.task import Task

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def module_of(file: Path) -> ModuleType:
    """A script or an example, imported without running it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def example(name: str, params: dict[str, Any], **keys: Any) -> tuple[type[Task], JobSpec]:
    """An example's task and its job, with these parameters and keys over its own."""
    spec = load_job(EXAMPLES / f"{name}.yaml", {}, []).spec
    keys = {"params": {**spec.params, **params}, **keys}
    if "steps" in keys:
        keys["epochs"] = None
    return load_task_type(spec.task, spec.seed), JobSpec.model_validate({**spec.model_dump(), **keys})


def idx_bytes(content: torch.Tensor) -> bytes:
    """A tensor of bytes as an idx file."""
    return struct.pack(f">HBB{content.ndim}I", 0, 8, content.ndim, *content.shape) + content.numpy().tobytes()


def write_fashion(folder: Path, training: int = 96, validation: int = 40, *, packed: bool = True) -> Path:
    """The four files of a small Fashion-MNIST: noise, with a bright row that tells the class."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    for part, count in (("train", training), ("t10k", validation)):
        labels = torch.randint(0, 10, (count,), generator=generator).to(torch.uint8)
        images = torch.randint(0, 100, (count, 28, 28), generator=generator).to(torch.uint8)
        images[torch.arange(count), 2 * labels.long()] = 255
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            data = idx_bytes(content)
            file = folder / (f"{name}.gz" if packed else name)
            file.write_bytes(gzip.compress(data, compresslevel=1) if packed else data)
    return folder
