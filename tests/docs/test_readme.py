"""The documentation says what the code does: keys, floors, commands, links and snippets."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from pydantic_core import PydanticUndefined

from quorate.cli.app import app
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.load import load_job

ROOT = Path(__file__).resolve().parents[2]
JOB = (ROOT / "docs/reference/job.md").read_text()
CLI = (ROOT / "docs/reference/cli.md").read_text()
ARCHITECTURE = (ROOT / "docs/explanation/architecture.md").read_text()
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The rows of the table in a text, without its head."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def snippets(page: str, language: str = "") -> list[str]:
    blocks: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [content for kind, content in blocks if kind == language]


def floors() -> list[set[str]]:
    """The floors that import-linter holds, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers: list[str] = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [set(layer.split(" | ")) for layer in layers if layer != "__main__"]


def relative_links() -> list[tuple[str, str]]:
    return [
        (name, target)
        for name, page in PAGES.items()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page)
        if "://" not in target
    ]


# --- the job file


def test_the_table_of_keys_is_that_of_the_job_file() -> None:
    told = [(key.strip("`"), mark) for key, mark, *_ in table(JOB)]
    assert told == [(key, mark_of(key).value) for key in JobSpec.model_fields]


@pytest.mark.parametrize("row", table(JOB), ids=lambda row: str(row[0].strip("`")))
def test_the_defaults_of_keys_are_those_of_the_job_file(row: list[str]) -> None:
    key, _, told, _ = row
    field = JobSpec.model_fields[key.strip("`")]
    if told == "required":
        assert field.default is PydanticUndefined
    elif told.startswith("`"):
        default = field.default.model_dump() if hasattr(field.default, "model_dump") else field.default
        assert yaml.safe_load(told.strip("`")) == default
    else:
        assert key == "`name`", "only the name has a default that depends on the file"


def test_the_job_file_in_the_reference_is_valid() -> None:
    (text,) = snippets(JOB, "yaml")
    job = JobSpec.model_validate(yaml.safe_load(text))
    assert (ROOT / job.task.partition(":")[0]).is_file()


def test_the_example_job_file_is_valid() -> None:
    assert load_job(ROOT / "examples/digits.yaml", {}, []).spec.name == "digits"


# --- Python


@pytest.mark.parametrize("page", [name for name, page in PAGES.items() if snippets(page, "python")])
def test_python_snippets_parse(page: str) -> None:
    for snippet in snippets(PAGES[page], "python"):
        ast.parse(snippet)


def test_public_names_in_the_documentation_exist() -> None:
    stub = ast.parse((ROOT / "src/quorate/__init__.pyi").read_text())
    public = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    snippets_of_all = "\n".join(code for page in PAGES.values() for code in snippets(page, "python"))
    used = set(re.findall(r"\bquorate\.([A-Za-z]\w*)", snippets_of_all))
    assert {"Task", "Job", "train"} <= used <= public


# --- the code


def test_every_package_has_its_line_in_floor_order() -> None:
    rows = table(section(ARCHITECTURE, "Floors"))
    named = [re.fullmatch(r"\[(\w+)\]\(../../src/quorate/\1\)", row[0]) for row in rows]
    order = [match[1] for match in named if match]
    assert sorted(order) == sorted(file.parent.name for file in (ROOT / "src/quorate").glob("*/__init__.py"))
    on_floor = {package: number for number, floor in enumerate(floors()) for package in floor}
    assert order == sorted(order, key=on_floor.__getitem__)


def test_the_floors_in_the_architecture_are_those_that_are_checked() -> None:
    drawing = snippets(section(ARCHITECTURE, "Floors"))[0]
    told = [set(re.split(r" {3,}", line)[0].split(" | ")) for line in drawing.splitlines()]
    assert told == floors()


# --- commands and links


def test_the_verbs_of_the_command_line_are_told() -> None:
    block = snippets(CLI)[0]
    verbs = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    verbs |= {group.name or "" for group in app.registered_groups}
    assert set(re.findall(r"^quorate (\w+)", block, re.MULTILINE)) == verbs


def test_every_make_target_in_the_documentation_exists() -> None:
    told = {target for page in PAGES.values() for target in re.findall(r"(?:`|^)make ([a-z-]+)", page, re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= told <= targets


@pytest.mark.parametrize(("page", "target"), relative_links())
def test_relative_links_lead_somewhere(page: str, target: str) -> None:
    assert ((ROOT / page).parent / target).exists()


def test_every_decision_is_in_the_index() -> None:
    index = re.findall(r"\((\d+-.*?\.md)\)", PAGES["docs/decisions/README.md"])
    assert index == sorted(page.name for page in (ROOT / "docs/decisions").glob("0*.md"))
