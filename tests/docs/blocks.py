"""The blocks of code in README and docs: which there are, what is to be done with each, and a page's as one script.

A mark says what differs from running a block, as a comment before it or, for a whole page, before its heading:

- ``<!-- test: parse, REASON -->``: it is not run, since something is missing here; its commands and names must be known
- ``<!-- test: background -->``: it runs on, while the next blocks are run
- ``<!-- test: running -->``: it is about a job that is running, RUN: one is started for it

A block whose first line is a comment with the name of a file is that file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}
SPOKEN = ("", "text")
"""Languages of what is only read."""

_BLOCK = re.compile(r"(?:^<!-- test: ([^>]*?) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGE_MARK = re.compile(r"^<!-- test: ([^>]*?) -->\n+# ", re.MULTILINE)
_FILE = re.compile(r"# (\S+\.\w+)\n")

# A job that takes a while is one that the next commands find running.
PREAMBLE = """
set -eu
# By when it was created: the folder itself changes, too, when the job of an earlier block ends.
newest_run() { ls -t runs/*/created 2>/dev/null | head -1; }
wait_for_step() {  # of the newest run
    for _ in $(seq 600); do
        newest=$(newest_run)
        if [ -n "$newest" ] && [ "$newest" != "$before" ] &&
            grep -q '"kind":"step"' "${newest%created}events.jsonl" 2>/dev/null
        then return; fi
        sleep 0.2
    done
    echo "no run has begun" >&2; exit 1
}
begin() { before=$(newest_run); }
a_running_job() {
    begin
    QUORATE_EPOCHS=30 quorate train examples/digits.yaml --workers 2 --quiet &
    wait_for_step
}
trap 'code=$?; kill $(jobs -p) 2>/dev/null || true; wait; exit $code' EXIT
"""


@dataclass(frozen=True)
class Block:
    """One block of a page; `mark` is empty where it is just run."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    reason: str

    @property
    def file(self) -> str | None:
        """The file that it is, if it is one."""
        name = _FILE.match(self.text)
        return name[1] if name else None

    @property
    def is_run(self) -> bool:
        """Whether a shell does something with it."""
        return self.mark != "parse" and (self.language in ("sh", "python") or self.file is not None)

    @property
    def commands(self) -> list[str]:
        """The lines of a shell, without comments, those that are broken in one."""
        whole = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.splitlines())
        return [each.strip() for line in lines if line for each in re.split(r"&&|;", line)]

    def script(self) -> str:
        """What a shell does with it."""
        if self.file is not None:
            return f"cat > {self.file} <<'END OF FILE'\n{self.text}END OF FILE\n"
        if self.language == "python":
            name = f"block_{self.line}.py"
            return f"cat > {name} <<'END OF FILE'\n{self.text}END OF FILE\npython {name}\n"
        if self.mark == "background":
            return f"begin\n( export QUORATE_EPOCHS=30\n{self.text}) &\nwait_for_step\n"
        text = re.sub(r"\bRUN\b", "last", self.text)
        return f"a_running_job\n{text}" if self.mark == "running" else text


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = PAGES[page]
    whole = _PAGE_MARK.search(text)
    return [_block(page, text, match, whole[1] if whole else "") for match in _BLOCK.finditer(text)]


def _block(page: str, text: str, match: re.Match[str], whole: str) -> Block:
    mark, _, reason = (match[1] or whole).partition(", ")
    return Block(page, text.count("\n", 0, match.start(3)), match[2], match[3], mark, reason.strip())


def all_blocks() -> Iterator[Block]:
    """All that are more than something to read."""
    yield from (block for page in PAGES for block in blocks_of(page) if block.language not in SPOKEN)


def script_of(page: str) -> str:
    """The blocks of a page that are run, in its order."""
    return PREAMBLE + "".join(f"\n: line {each.line}\n{each.script()}" for each in blocks_of(page) if each.is_run)
