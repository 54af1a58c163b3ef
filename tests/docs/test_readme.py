"""The documentation says what the code does: floors, commands, links and snippets."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def relative_links() -> dict[str, list[str]]:
    """What each page links to in the repository, itself included."""
    found = {name: re.findall(r"\]\(([^)\s]+)\)", _without_blocks(page)) for name, page in PAGES.items()}
    return {name: [target for target in targets if "://" not in target] for name, targets in found.items()}


def anchors(page: str) -> set[str]:
    """Of the headings of a page, as code hosts and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def _without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


# --- the code


def test_every_package_has_its_line_in_floor_order() -> None:
    rows = table(section(ARCHITECTURE, "Layers"))
    named = [re.fullmatch(r"\[(\w+)\]\(../../src/quorate/\1\)", row[0]) for row in rows]
    order = [match[1] for match in named if match]
    assert sorted(order) == sorted(file.parent.name for file in (ROOT / "src/quorate").glob("*/__init__.py"))
    on_floor = {package: number for number, floor in enumerate(floors()) for package in floor}
    assert order == sorted(order, key=on_floor.__getitem__)


def test_the_floors_in_the_architecture_are_those_that_are_checked() -> None:
    drawing = snippets(section(ARCHITECTURE, "Layers"))[0]
    told = [set(re.split(r" {3,}", line)[0].split(" | ")) for line in drawing.splitlines()]
    assert told == floors()


# --- commands and links


def test_every_make_target_in_the_documentation_exists() -> None:
    told = {target for page in PAGES.values() for target in re.findall(r"(?:`|^)make ([a-z-]+)", page, re.MULTILINE)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= told <= targets


@pytest.mark.parametrize("page", relative_links())
def test_relative_links_lead_somewhere(page: str) -> None:
    for link in relative_links()[page]:
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target.read_text()), link


def test_every_page_is_in_the_index_which_is_the_navigation() -> None:
    told = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in relative_links()["docs/README.md"]}
    pages = {ROOT / name for name in PAGES if name.startswith("docs/") and not name.startswith("docs/decisions/0")}
    assert pages - told == {ROOT / "docs/README.md"}


def test_every_decision_is_in_the_index() -> None:
    index = re.findall(r"\((\d+-.*?\.md)\)", PAGES["docs/decisions/README.md"])
    assert index == sorted(page.name for page in (ROOT / "docs/decisions").glob("0*.md"))
