"""What people read is plain English: no words that have to be learned first, and no odd ones."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from quorate.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = (
    r"go(es|ing)? on (from|with|to|without|there|elsewhere)",  # continue, resume
    r"(they|runs) (do not )?part\b",  # diverge
    r"(is|are|was|were) told",  # recorded, shown, reported
    r"tells? (of|which|what|where)",  # says, reports
    r"mend(s|ed)?",  # fix, repair
    r"anew",  # again
    r"whole checkpoints?",  # valid
    r"has not been heard",  # has sent no heartbeat
    r"last words?",
    r"comes? about",  # is injected, happens
    r"on_poison",
    r"nurser(y|ies)|incarnations?|broods?|islands?",
)
"""With what is written instead. Words that have another sense besides are left out."""
EVERYWHERE = (r"nurser(y|ies)", r"broods?")
"""Those that the documentation does without as well."""


def found(words: tuple[str, ...], text: str) -> list[str]:
    """The words of these that a text has, whatever its line ends."""
    flat = " ".join(text.split())
    return [match[0] for word in words for match in re.finditer(rf"\b(?:{word})\b", flat, re.IGNORECASE)]


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for verb, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {verb}")


@pytest.mark.parametrize(("name", "command"), [*commands(typer.main.get_command(app), "quorate")])
def test_help_is_plain_english(name: str, command: Any) -> None:
    assert found(FORBIDDEN, command.get_help(command.context_class(command, info_name=name))) == []


@pytest.mark.parametrize("page", sorted((ROOT / "tests/catalogue").glob("*.md")), ids=lambda page: page.stem)
def test_answers_to_mistakes_are_plain_english(page: Path) -> None:
    assert found(FORBIDDEN, page.read_text()) == []


@pytest.mark.parametrize(
    "page",
    # The glossary has them, for whoever meets them in an old run.
    [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "words.md")],
    ids=lambda page: page.stem,
)
def test_pages_have_no_words_of_our_own(page: Path) -> None:
    assert found(EVERYWHERE, page.read_text()) == []


def test_a_forbidden_word_is_found() -> None:
    assert found(FORBIDDEN, "It goes\n  on from step 3, once it is mended.") == ["goes on from", "mended"]
