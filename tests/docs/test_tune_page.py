"""The page about searches tells all keys and their defaults. Its examples are read by `test_blocks`."""

import re
from pathlib import Path

from quorate.spec.yaml_document import read_yaml
from quorate.tune.spec import KINDS, DimensionSpec, SearchSpec

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "tune.md").read_text()


def rows(section: str) -> list[list[str]]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]


def test_the_table_has_every_key_in_order() -> None:
    assert [row[0].strip("`") for row in rows("Keys")] == list(SearchSpec.model_fields)


def test_the_defaults_are_those_of_the_model() -> None:
    model = SearchSpec().model_dump()
    written = {row[0].strip("`"): row[1].strip("`") for row in rows("Keys") if re.fullmatch(r"`[^`]+`", row[1])}
    assert len(written) > 8
    for key, text in written.items():
        default = model[key]
        expected = default["kind"] if isinstance(default, dict) and "kind" in default else default
        assert read_yaml(text).value == expected, key


def test_every_form_of_a_dimension_is_told() -> None:
    forms = [read_yaml(row[0].strip("`")).value for row in rows("The space")]
    assert [DimensionSpec.model_validate(form).kind for form in forms] == list(KINDS)
