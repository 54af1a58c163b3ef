"""Pages of what was typed and what was said, which a person can read and a test holds to the letter.

With UPDATE_GOLDEN=1 in the environment the tests write them instead; then read the difference as a newcomer would.
"""

import fcntl
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import schemas
from catalogue.case import Case
from command import Done, Workplace
from quorate.cli.errors import fold
from quorate.storage.atomic import write_atomically

HERE = Path(__file__).parent
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))
WIDTH = 80

Placeholders = Sequence[tuple[str, str]]
PLACEHOLDERS: Placeholders = [
    (r'File "[^"]*/site-packages/([^"]*)", line \d+', r'File "<packages>/\1", line <n>'),
    (r"\bpid \d+", "pid <pid>"),
    (r"\bprocess \d+", "process <pid>"),
    (r"on host [\w.-]+", "on host <host>"),
    (r"\b[0-9a-f]{12}…", "<digest>…"),
    (r"\bdigest is [0-9a-f]{32}\b", "digest is <digest>"),
    (r"\bthe float \d+\.\d+", "the float <n>"),
    (r"\b[0-9,]+ are free", "<n> are free"),
    (r"(-of-\d)\.[0-9a-f]{32}\.", r"\1.<digest>."),
    (r"\bport \d{5}\b", "port <port>"),
    (r"\breads up to \d+", "reads up to <n>"),
    (r"The keys here: (version|params)[^.]*\.", "The keys here: <keys>."),
    # How a place in a line is marked depends on the version of Python.
    (r"\n *[~^]+(?=\n|$)", ""),
]
PROGRESS = re.compile(
    r"^(step|checkpoint|evaluation|finished|stopping|stopped|tiny-\d+ in|WARNING: \d+ workers) .*\n", re.MULTILINE
)
# In a job that is disturbed, where it happens is a matter of chance.
SOMEWHERE = (
    (r"\bstep([ -])\d+", r"step\1<n>"),
    (r'"step": \d+', '"step": <n>'),
    (r"while in \w+", "while in <phase>"),
    (r"last seen at step <n>, \w+", "last seen at step <n>, <phase>"),
    (r'"phase": "\w+"', '"phase": "<phase>"'),
    (r"heard for [0-9.]+ s", "heard for <n> s"),
)


class Page:
    """One page: a title, and a section for each case."""

    def __init__(self, name: str, title: str, cases: Sequence[Case]) -> None:
        self.file = HERE / f"{name}.md"
        self.title = title
        self.cases = {case.title: case for case in cases}
        assert len(self.cases) == len(cases), "two cases have one title"

    def hold(self, case: Case, done: Done, workplace: Workplace, *, somewhere: bool = False) -> None:
        """Compare what was said with the page; `somewhere`: at a step that may be another one the next time."""
        _check_document(done)
        placeholders = [*PLACEHOLDERS, *(SOMEWHERE if somewhere else ())]
        placeholders.insert(0, (re.escape(str(workplace.folder)), "<folder>"))
        section = _section(case, done, placeholders)
        if UPDATE:
            self._replace(case.title, section)
        assert section == self.sections()[case.title], "the page tells it otherwise; UPDATE_GOLDEN=1 rewrites it"

    def sections(self) -> dict[str, str]:
        """What the page says, by title."""
        text = self.file.read_text() if self.file.exists() else ""
        parts = re.split(r"^## (.*)\n\n", text, flags=re.MULTILINE)[1:]
        return dict(zip(parts[::2], (part.rstrip("\n") + "\n" for part in parts[1::2]), strict=True))

    def _replace(self, title: str, section: str) -> None:
        with (HERE / "case.py").open() as turn:  # cases run in several processes
            fcntl.flock(turn, fcntl.LOCK_EX)
            told = self.sections() | {title: section}
            written = [f"## {name}\n\n{told[name]}" for name in self.cases if name in told]
            write_atomically(self.file, "\n".join([f"# {self.title}\n", *written]))


def _section(case: Case, done: Done, placeholders: Placeholders) -> str:
    said = _plain(PROGRESS.sub("", done.stderr), placeholders).rstrip("\n")
    brief = _plain(json.dumps(_brief(done.document)), placeholders)
    typed = "".join(f"{name}={value} " for name, value in case.environment.items()) + case.command
    blocks = [case.story, _block("yaml", case.text or case.job), _block("python", case.task)]
    told = _block("console", f"$ {typed}\n{_folded(said)}")
    return "\n".join(
        [*(f"{block.rstrip()}\n" for block in blocks if block), told, f"Exit code {done.code}, `{brief}`\n"]
    )


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n" if text else ""


def _folded(said: str) -> str:
    """As a terminal of the usual width shows it; a traceback is shown as it is."""
    before, blank, rest = said.partition("\n\n")
    trace, another_blank, after = rest.partition("\n\n")
    return fold(before, WIDTH) + blank + trace + another_blank + fold(after, WIDTH)


def _plain(text: str, placeholders: Placeholders) -> str:
    for pattern, placeholder in placeholders:
        text = re.sub(pattern, placeholder, text)
    return text


def _brief(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what stands in the text above it already."""
    brief = {key: value for key, value in document.items() if key not in ("error", "problems", "folder")}
    if "failure" in brief:
        kept = ("kind", "worker", "lane", "step", "phase")
        brief["failure"] = {key: document["failure"][key] for key in kept if document["failure"][key] not in (None, "")}
    return brief


def _check_document(done: Done) -> None:
    """What programs are told is what people are told, and both are told in the agreed form."""
    document = done.document
    schemas.validate("error", document)
    assert (document["exit_code"], done.error) == (done.code, document["error"])
    for problem in document.get("problems", ()):
        assert problem["path"] in done.error
    failure = document.get("failure")
    if failure is not None:
        assert (failure["message"], failure["exit_code"]) == (document["error"], done.code)
        assert failure["traceback"] == done.traceback
    assert "/quorate/" not in done.traceback, "a frame of our own in a user's traceback"
