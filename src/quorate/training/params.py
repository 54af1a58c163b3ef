"""The job file's `params` become attributes of the task, typed and checked like the rest of the job file."""

import copy
import inspect
import json
import warnings
from typing import Any, ClassVar, get_origin, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from quorate.core.errors import JobFileError, Problem
from quorate.core.seeds import derive_seed
from quorate.core.user_code import building_code
from quorate.data.streams import seed_generators
from quorate.spec.problems import describe_errors
from quorate.training.task import Task


def configure(task_type: type[Task], params: dict[str, Any], source: str, seed: int) -> Task:
    """An instance of the task with its parameters set; every mistake is told at once."""
    fields = parameters_of(task_type)
    with warnings.catch_warnings():
        # A parameter may be called `schema` or `copy`, as methods of a pydantic model are: here nobody calls those.
        warnings.simplefilter("ignore", UserWarning)
        model = create_model(
            "params", __config__=ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True), **fields
        )
    try:
        # As JSON: a list may then be given for a tuple and a text for a path, but never a text for a number.
        checked = model.model_validate_json(json.dumps(params))
    except ValidationError as error:
        raise JobFileError(source, describe_errors(error, model, prefix="params")) from None
    seed_generators(derive_seed(seed, "task"))
    with building_code(f"{task_type.__name__}()"):
        task = task_type()
    for name in fields:
        setattr(task, name, getattr(checked, name))
    return task


def parameters_of(task_type: type[Task]) -> dict[str, Any]:
    """Name → (type, default) of every annotated attribute of the task."""
    try:
        hints = get_type_hints(task_type, include_extras=True)
    except NameError as error:
        raise JobFileError(
            task_type.__name__, [Problem("params", f"an annotation of the task is unknown: {error}")]
        ) from None
    ignored = {name for base in Task.__mro__ for name in inspect.get_annotations(base)}
    return {
        name: (hint, copy.deepcopy(getattr(task_type, name, ...)))
        for name, hint in hints.items()
        if name not in ignored and ClassVar not in (hint, get_origin(hint)) and not name.startswith("_")
    }
