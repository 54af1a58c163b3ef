"""The job file's `params`: typed and checked, and never shared between two tasks."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from quorate.core.errors import JobFileError, UserCodeError
from quorate.task.task import Task, configure, notice_of_misspelt, parameters_of


class Base(Task):
    learning_rate: float = 0.1
    layers: int


class Model(Base):
    sizes: tuple[int, ...] = (3, 4)
    folder: Path = Path("data")
    names: list[str] = []  # noqa: RUF012 (as users write it)
    options: dict[str, float] = {"a": 1.0}  # noqa: RUF012
    kind: Literal["small", "large"] = "small"
    rate: float | None = None
    layers: int = 2
    constant: ClassVar[int] = 5
    bare: ClassVar = 6
    _private: int = 7
    without_annotation = 8


def refused(task_type: type[Task], params: dict[str, Any]) -> str:
    with pytest.raises(JobFileError) as raised:
        configure(task_type, params, "job.yaml", 0)
    return str(raised.value)


def test_defaults_stand_where_nothing_is_given() -> None:
    task = configure(Model, {}, "job.yaml", 0)
    assert isinstance(task, Model)
    assert (task.learning_rate, task.layers, task.sizes, task.folder) == (0.1, 2, (3, 4), Path("data"))


class Misspelt(Base):
    scheduler = None

    def metric(self) -> None: ...

    def helper(self) -> None: ...


class Spelt(Misspelt):
    order_by: str = ""

    def metrics(self, *_: Any) -> Any: ...

    def schedule(self, *_: Any) -> Any: ...


def test_names_that_are_almost_a_tasks_are_told_unless_it_has_that_one() -> None:
    notice = notice_of_misspelt(Misspelt) or ""
    assert notice.endswith(": metric (did you mean metrics?), scheduler (did you mean schedule?)")
    assert notice_of_misspelt(Spelt) is None


def test_only_annotated_public_attributes_are_parameters() -> None:
    assert set(parameters_of(Model)) == {
        "learning_rate",
        "layers",
        "sizes",
        "folder",
        "names",
        "options",
        "kind",
        "rate",
    }


def test_values_take_their_annotated_types() -> None:
    given = {"sizes": [5, 6, 7], "folder": "/tmp/x", "learning_rate": 1, "rate": 0.5, "kind": "large"}
    task = configure(Model, given, "job.yaml", 0)
    assert isinstance(task, Model)
    assert task.sizes == (5, 6, 7)
    assert task.folder == Path("/tmp/x")
    assert (task.learning_rate, type(task.learning_rate)) == (1.0, float)
    assert (task.rate, task.kind) == (0.5, "large")


def test_a_missing_parameter_is_named() -> None:
    text = refused(Base, {})
    assert "params.layers" in text
    assert "job.yaml has a mistake" in text


def test_an_unknown_parameter_is_told_with_the_nearest_word() -> None:
    text = refused(Model, {"learning_rte": 0.2})
    assert "params.learning_rte" in text
    assert "learning_rate" in text.replace("params.learning_rte", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", "3"),
        ("layers", 3.5),
        ("layers", True),
        ("learning_rate", "0.1"),
        ("sizes", [1, "2"]),
        ("folder", 3),
        ("kind", "medium"),
        ("names", "a"),
        ("options", [1]),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_stands(name: str, value: Any) -> None:
    assert f"params.{name}" in refused(Model, {name: value})


def test_every_mistake_is_told_at_once() -> None:
    text = refused(Model, {"layers": "3", "folder": 3, "unheard_of": 1})
    assert "3 mistakes" in text
    assert all(f"params.{name}" in text for name in ("layers", "folder", "unheard_of"))


def test_mutable_defaults_are_not_shared() -> None:
    one, other = configure(Model, {}, "", 0), configure(Model, {}, "", 0)
    assert isinstance(one, Model) and isinstance(other, Model)
    one.names.append("x")
    one.options["b"] = 2.0
    assert other.names == Model.names == []
    assert other.options == Model.options == {"a": 1.0}


def test_constraints_in_an_annotation_hold() -> None:
    class Bounded(Task):
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    assert vars(configure(Bounded, {"dropout": 0.5}, "", 0))["dropout"] == 0.5
    assert "params.dropout" in refused(Bounded, {"dropout": 1.5})


def test_names_that_pydantic_uses_itself_are_free() -> None:
    class Named(Task):
        model_size: int = 1
        schema: str = "x"
        copy: bool = False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = configure(Named, {"model_size": 3, "schema": "y", "copy": True}, "", 0)
    assert vars(task) == {"model_size": 3, "schema": "y", "copy": True}


def test_a_dataclass_may_be_a_parameter() -> None:
    @dataclass
    class Shape:
        width: int
        depth: int = 2

    task_type = type("Shaped", (Task,), {"__annotations__": {"shape": Shape}})
    assert vars(configure(task_type, {"shape": {"width": 3}}, "", 0))["shape"] == Shape(3, 2)
    assert "params.shape" in refused(task_type, {"shape": {"width": "x"}})


def test_an_annotation_that_does_not_exist_is_told() -> None:
    task_type = type("Odd", (Task,), {"__annotations__": {"size": "Nonsense"}})
    assert "Nonsense" in refused(task_type, {})


def test_an_exception_while_the_task_is_made_is_the_users() -> None:
    class Demanding(Task):
        def __init__(self, argument: int) -> None:
            self.argument = argument

    with pytest.raises(UserCodeError, match=r"argument.*Demanding\(\)"):
        configure(Demanding, {}, "", 0)


def test_numbers_that_are_not_finite_go_through_as_they_are() -> None:
    task = configure(Base, {"learning_rate": math.inf, "layers": 2}, "", 0)
    assert vars(task)["learning_rate"] == math.inf


class Untyped(Model):
    width = 32
    limit = None
    options_of_it = property(lambda self: 1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("width", "Untyped.width has no type, so it is no parameter. Write its type in the class: width: int = 32"),
        ("limit", "limit: float | None = None"),
        ("options_of_it", "there is no such key"),
        ("model", "there is no such key"),
    ],
)
def test_an_attribute_without_a_type_is_no_parameter_and_how_it_becomes_one_is_told(name: str, told: str) -> None:
    assert told in refused(Untyped, {name: 3})
