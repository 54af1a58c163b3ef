"""What MkDocs does besides: the navigation from docs/README.md, links into the repository, and a look at the result.

A page links to files of the repository as anybody reads them there, such as `../../src/quorate/training/loop.py`.
In the site each of these files is a page of its own below `code/`, so that every link leads somewhere, offline too.
"""

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CODE = "code"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".json": "json"}
_LINK = re.compile(r"(?<=\]\()(?!\w+://)([^)#\s]+)(?=[)#])")
_ENTRY = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)")


# --- navigation


def on_config(config: Any) -> None:
    """The sections of docs/README.md with the pages that they link to, in that order."""
    config.nav = [{"Home": "README.md"}, *_sections()]


def _sections() -> list[Any]:
    text = (DOCS / "README.md").read_text()
    intro, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    nav: list[Any] = [{"Tutorial": _entries(intro)[0][1]}]
    for section in sections:
        pages: list[Any] = [{title: page} for title, page in _entries(section) if page != "decisions/README.md"]
        if "decisions/README.md" in section:
            pages.append({"Decisions": ["decisions/README.md", *_decisions()]})
        nav.append({section.splitlines()[0]: pages})
    return nav


def _entries(text: str) -> list[tuple[str, str]]:
    return _ENTRY.findall(text)


def _decisions() -> list[Any]:
    text = (DOCS / "decisions" / "README.md").read_text()
    return [{title.replace("`", ""): f"decisions/{page}"} for title, page in _entries(text)]


# --- files of the repository


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file of the repository that a page links to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _outside(page):
            if target not in seen:
                seen.add(target)
                files.append(File.generated(config, _uri(target), content=_content(target)))
                waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links out of docs/ lead to the pages that stand for those files."""
    here = page.file.src_uri
    file = DOCS / here if not here.startswith(f"{CODE}/") else _repository_file(here)
    if file.suffix != ".md":
        return markdown

    def translated(match: re.Match[str]) -> str:
        target = (file.parent / match[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        within = str(_readme(target).relative_to(DOCS)) if target.is_relative_to(DOCS) else _uri(target)
        return os.path.relpath(within, Path(here).parent)

    return _LINK.sub(translated, markdown)


def _outside(page: Path) -> list[Path]:
    targets = [(page.parent / link).resolve() for link in _LINK.findall(page.read_text())]
    return [_readme(each) for each in targets if each.exists() and not each.is_relative_to(DOCS)]


def _readme(target: Path) -> Path:
    return target / "README.md" if (target / "README.md").is_file() else target


def _uri(target: Path) -> str:
    path = _readme(target).relative_to(ROOT).as_posix()
    return f"{CODE}/{path}" if path.endswith(".md") else f"{CODE}/{path}.md"


def _repository_file(uri: str) -> Path:
    path = ROOT / uri.removeprefix(f"{CODE}/")
    return path if path.exists() else path.with_suffix("")


def _content(target: Path) -> str:
    if target.suffix == ".md":
        return target.read_text()
    name = target.relative_to(ROOT)
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n"
    if target.is_dir():
        return (
            head + "\n".join(f"- {each.name}" for each in sorted(target.iterdir()) if each.name[0] not in "._") + "\n"
        )
    return f"{head}``````{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text().rstrip()}\n``````\n"


# --- the built site


class _Page(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {str(given[name]) for name in ("id", "name") if given.get(name)}
        if (target := given.get("href") or given.get("src")) is not None:
            (self.links if tag == "a" else self.loaded).append(target)


def on_post_build(config: Any) -> None:
    """Refuse a site with a link that leads nowhere, or a page that loads something from elsewhere."""
    site = Path(config.site_dir).resolve()
    pages = {file: _Page(file.read_text()) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}
    if problems := [problem for file in pages for problem in _problems(file, pages)]:
        raise PluginError("\n".join(f"{file.relative_to(site)}: {what}" for file, what in problems))


def _problems(file: Path, pages: dict[Path, _Page]) -> Iterator[tuple[Path, str]]:
    for target in pages[file].loaded:
        if urlsplit(target).netloc:
            yield file, f"loads {target} from elsewhere"
    for target in (*pages[file].links, *pages[file].loaded):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        found = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        if not found.exists():
            yield file, f"{target} leads nowhere"
        elif parts.fragment and found in pages and unquote(parts.fragment) not in pages[found].anchors:
            yield file, f"{target} has no such anchor"
