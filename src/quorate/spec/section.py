"""What the sections of a job file are made of."""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from quorate.spec.keys import Allowed

Count = Annotated[int, Field(ge=1), Allowed("a whole number of at least 1")]
CountOrZero = Annotated[int, Field(ge=0), Allowed("a whole number of at least 0")]
OptionalCount = Annotated[int | None, Field(ge=1), Allowed("a whole number of at least 1, or null")]
Positive = Annotated[float, Field(gt=0), Allowed("a number above 0")]
Fraction = Annotated[float, Field(gt=0, le=1), Allowed("a fraction above 0 and at most 1")]
OptionalPositive = Annotated[float | None, Field(gt=0), Allowed("a number above 0, or null")]

FOLDER = "folder"
"""The context of a validation in which paths are made absolute: a run that is resumed elsewhere must find them too."""


def _placed(path: str, info: ValidationInfo) -> str:
    with contextlib.suppress(RuntimeError):  # a home that nobody has
        return str(info.context[FOLDER].absolute() / Path(path).expanduser()) if path and info.context else path
    return path


FilePath = Annotated[str, AfterValidator(_placed)]
"""A file or folder, relative to the job file."""

VERSION: Final = 2
"""Of the job files that this Quorate writes."""
AUTO = "auto"
AUTO_BATCH = 2**62
"""Stands for `batch_size: auto` until a number is found, before the run has its folder: nothing is trained with it."""


_SMALLER = re.compile(r"loss|error|perplexity|mae|mse|rmse", re.IGNORECASE)
_LARGER = re.compile(r"acc|accuracy|top\d*|f1|auc|recall|precision|iou|map|bleu|score|reward|r2", re.IGNORECASE)


def usual_mode(metric: Any) -> str | None:
    """Whether of a metric with such a name smaller ("min") or larger ("max") values are better; None if it does not
    say."""
    words = re.split(r"[\W_]+", str(metric))
    if any(_SMALLER.fullmatch(word) for word in words):
        return "min"
    return "max" if any(_LARGER.fullmatch(word) for word in words) else None


def spelled_out(section: Any) -> Any:
    """A section that has kinds, and is given by its kind alone."""
    return {"kind": section} if isinstance(section, str) else section


class Section(BaseModel):
    """A mapping of known keys, whose values are taken as they are written: no "3" for 3, no true for 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
