from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.spec.yaml_document import read_yaml, write_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("1_000", 1000),
        ("0x1f", 31),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x", "0x"),
        ("model.py:Task", "model.py:Task"),
        ("'3'", "3"),
        ("<<: 1", {"<<": 1}),
        ("{a: [1, {b: 2}]}", {"a": [1, {"b": 2}]}),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: Any) -> None:
    document = read_yaml(text)
    assert not document.problems
    assert (document.value, type(document.value)) == (value, type(value))


def test_the_line_of_every_key() -> None:
    document = read_yaml("a: 1\n\nb:\n  c: 2\n  d: {e: 3}\n")
    assert {key: place.line for key, place in document.places.items()} == {
        "a": 1,
        "b": 3,
        "b.c": 4,
        "b.d": 5,
        "b.d.e": 5,
    }


def test_the_comment_behind_a_value() -> None:
    document = read_yaml("a: 'x # no'  # yes\nb: 1\nc: {}  # also")
    assert [document.places[key].comment for key in "abc"] == ["yes", "", "also"]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("a: 1\nb: {c: 1,\n    c: 2}\n", "b.c", "line 2 and on line 3"),
        ("a: 1\na: 2\n", "a", "line 1 and on line 2"),
        ("a: !!python/object/apply:os.system [ls]", "a", "!!python/object/apply:os.system"),
        ("a: !secret x", "a", "!secret"),
        ("a: !!binary aGk=", "a", "!!binary"),
        ("a: !!set {x}", "a", "!!set"),
        ("a: !!int ''", "a", "cannot be read"),
        ("a: !!bool maybe", "a", "cannot be read"),
        ("a: {1: 2}", "a", "must be text, not 1"),
        ("? [x]\n: 1", "file", "must be text"),
        ("a: " + "9" * 5000, "a", "cannot be read"),
        ("a: [1, 2", "line 1, column 9", "expected"),
        ("a: b: c", "line 1, column 5", "mapping values"),
        ("a:\n\tb: 1", "line 2, column 1", "cannot start any token"),
        ("a: &x 1\nb: *x", "line 2, column 4", "aliases"),
        ("a: &x [*x]", "line 1, column 8", "aliases"),
        ("a: 1\n---\nb: 2", "line 2, column 1", "document"),
        ("a: \x00", "file", "special characters"),
        ("- " * 1_000, "file", "nested too deeply"),
    ],
)
def test_mistakes_are_told_and_never_raised(text: str, path: str, words: str) -> None:
    (problem,) = read_yaml(text).problems
    assert problem.path == path
    assert words in problem.text


def test_all_mistakes_are_told_at_once() -> None:
    document = read_yaml("a: !x 1\nb: 1\nb: 2\n3: 4\nc: 5")
    assert len(document.problems) == 3
    assert document.value["c"] == 5


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(plain)
def test_a_written_value_stays_on_its_line_and_is_read_back_equal(value: Any) -> None:
    written = write_value(value)
    document = read_yaml(f"key: {written}  # comment")
    assert len(f"{written}".splitlines()) == 1
    assert not document.problems
    assert document.value == {"key": value}
    assert document.places["key"].comment == "comment"


@settings(deadline=None)
@given(st.sampled_from(["1e3", "no", "010", "1:30", "2024-01-01", "=", "<<", "~", "3", "true"]))
def test_other_readers_agree_about_what_is_written(text: str) -> None:
    assert yaml.safe_load(write_value(text)) == read_yaml(write_value(text)).value == text


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:-?[]{},#&*!|>'\"%@` \n\t1.~"), max_size=30))
def test_no_text_raises(text: str) -> None:
    read_yaml(text)
