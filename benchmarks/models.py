"""The jobs of examples/models, as they are and small enough for a test, for those who train them here."""

from pathlib import Path
from typing import Any

import yaml

MODELS = Path(__file__).resolve().parents[1] / "examples" / "models"

_SMALL_IMAGES = {"side": 32, "classes": 10, "synthetic": 4096}
_SMALL_TEXT = {"vocabulary": 500, "window": 16, "width": 32, "heads": 2, "layers": 2}
_SMALL: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 4, **_SMALL_IMAGES},
    "resnet50": {"width": 4, "depth": 18, **_SMALL_IMAGES},
    "vit_b16": {"patch": 8, "width": 32, "heads": 2, "layers": 2, **_SMALL_IMAGES},
    "gpt2": _SMALL_TEXT,
    "gpt2_1b": _SMALL_TEXT,
    "bert_large": _SMALL_TEXT,
    "cifar_resnet18": {"width": 4},
    "cifar_resnet50": {"width": 4, "depth": 18},
}
SMALL_BATCH = 16


def example_job(name: str, *, small: bool, **keys: Any) -> dict[str, Any]:
    """The job of that name with other values for some keys; `small`, for a CPU and a few seconds."""
    job: dict[str, Any] = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    job["task"] = f"{MODELS}/{job['task']}"
    if small:
        job["params"] |= _SMALL[name]
        job |= {"device": "cpu", "batch_size": SMALL_BATCH, "evaluate": {**job["evaluate"], "batch_size": SMALL_BATCH}}
    if "steps" in keys:
        job.pop("epochs", None)
    params = keys.pop("params", {})
    return job | keys | {"params": job["params"] | params}
