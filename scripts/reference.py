"""Writes docs/reference/{job,cli,api}.md and docs/json/README.md from the code.

::

    python scripts/reference.py

The pages are kept in the repository, so that they can be read wherever it is hosted and changes of them are reviewed.
A test says when they are out of date.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import quorate
import quorate.ray
from quorate.cli.app import app
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark, keys_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
GENERATED = "<!-- Written by scripts/reference.py from the code: change it there. -->"
EXAMPLES = "<!-- test: parse, the examples name files and runs of nobody -->"

JOB_INTRO = """\
# Job keys

```yaml
version: {version}
name: digits
task: examples/digits.py:Digits    # file.py:Class, relative to this file
params: {{learning_rate: 0.1}}
lanes: 4
batch_size: 64                     # the global batch, shared by the lanes
epochs: 12                         # or steps: 1000
schedule: {{kind: cosine, warmup: 20}}
evaluate: {{every: epoch}}
checkpoint: {{every: 100, keep: 3}}
```

A key either affects results, or only how the job runs. `quorate resume` may change the latter freely, and it may extend
`epochs` or `steps`.

Later layers win: job file, then the environment (`QUORATE_CHECKPOINT__EVERY=50`), then `--set checkpoint.every=50`,
then flags such as `--workers`. All mistakes are reported at once, each with the nearest valid word. `quorate show RUN`
shows where each value came from."""

HEADINGS = {
    Mark.LABEL: "Names",
    Mark.MEANING: "Keys that affect results",
    Mark.MANNER: "Keys that affect the runtime only",
}
MORE = {
    "task": {"write a task": "../tutorial/README.md", "keep your own loop": "../how-to/own-loop.md"},
    "batch_size": {"memory": "../how-to/memory.md"},
    "lineage": {"searching": "../how-to/tune.md"},
    "on_out_of_memory": {"memory": "../how-to/memory.md"},
    "on_bad_sample": {"streaming data": "../how-to/data.md"},
    "device": {"GPUs": "../how-to/gpu.md"},
    "loss_scale": {"GPUs": "../how-to/gpu.md"},
    "memory": {"memory": "../how-to/memory.md"},
    "strategy": {
        "parameter servers": "../how-to/servers.md",
        "DDP": "../how-to/gangs.md",
        "FSDP": "../how-to/fsdp.md",
        "compression": "../how-to/compression.md",
    },
    "workers": {"resizing": "../how-to/resize.md"},
    "engine": {"Ray": "../how-to/ray.md"},
    "step_timeout": {"hangs": "../how-to/hang.md"},
    "checkpoint": {"recovery": "../how-to/recover.md"},
    "share": {"security": "../how-to/security.md#who-may-read-a-run"},
    "encrypt": {"security": "../how-to/security.md"},
    "nccl": {"NCCL": "../how-to/nccl.md"},
    "check_gradients": {"bits": "../explanation/bits.md"},
    "audit": {"audits": "../explanation/bits.md#audits"},
    "record": {"reproduce": "../how-to/reproduce.md"},
    "track": {
        "tracking": "../how-to/tracking.md",
        "monitoring": "../how-to/monitoring.md",
        "traces": "../how-to/traces.md",
    },
    "notify": {"notifications": "../how-to/logs.md#notifications"},
    "callbacks": {"callbacks": "../how-to/callbacks.md"},
    "train_metrics_every": {"metrics": "../how-to/metrics.md#metrics-of-training-batches"},
}
"""Pages that say more about a key, by name."""


# --- the keys of a job


def job_page() -> str:
    """Every key: what it takes, its default, whether it affects results, and what it does."""
    parts = [GENERATED, JOB_INTRO.format(version=JobSpec.model_fields["version"].default)]
    for mark, heading in HEADINGS.items():
        keys = [key for key in JobSpec.model_fields if mark_of(key) is mark]
        parts += [f"## {heading}", " · ".join(f"[{key}](#{key})" for key in keys)]
        parts += [part for key in keys for part in _key(key)]
    return "\n\n".join(parts) + "\n"


def _key(key: str) -> Iterator[str]:
    field = JobSpec.model_fields[key]
    facts = [] if _sections(field.annotation) else [_taken(keys_of(JobSpec)[key].allowed)]
    yield f"### `{key}`"
    yield "*" + "; ".join([mark_of(key).value, *facts, *_default(field.default)]) + "*"
    yield from filter(None, [_described(JobSpec).get(key)])
    yield from _section_lists(key, field.annotation)
    yield from filter(None, [_links(MORE.get(key, {}))])


def _section_lists(path: str, annotation: Any) -> Iterator[str]:
    sections = _sections(annotation)
    for section in sections:
        doc = _paragraphs(section)
        kind = section.model_fields.get("kind")
        if len(sections) > 1 and kind is not None:
            doc = f"**`kind: {get_args(kind.annotation)[0]}`** {doc}"
        yield doc
        if lines := list(_inner_keys(path, section)):
            yield "\n".join(lines)


def _inner_keys(path: str, section: type[BaseModel]) -> Iterator[str]:
    allowed, described = keys_of(section), _described(section)
    for name, field in section.model_fields.items():
        if name == "kind" and len(get_args(field.annotation)) == 1:
            continue
        inner = _sections(field.annotation)
        facts = [] if inner else [_taken(allowed[name].allowed)]
        facts += [*_default(field.default), *(note.value for note in field.metadata if isinstance(note, Mark))]
        note = f" *({'; '.join(facts)})*" if facts else ""
        yield f"- `{path}.{name}`: {described[name]}{note}"
        for each in inner:
            yield from _inner_keys(f"{path}.{name}", each)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key may hold, one for each kind."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _described(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for base in model.__bases__:
        if base.__module__.startswith("quorate") and issubclass(base, BaseModel) and base.model_fields:
            texts |= _described(base)
    for field, text in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    # What an option has added says it by itself.
    return texts | {name: field.description for name, field in model.model_fields.items() if field.description}


def _taken(allowed: str) -> str:
    return allowed.replace("*", r"\*")


def _default(default: Any) -> Iterator[str]:
    if default is PydanticUndefined:
        yield "required"
    elif not isinstance(default, BaseModel):
        flow = yaml.safe_dump(default, default_flow_style=True, sort_keys=False, width=10**6)
        yield f"default `{flow.removesuffix('...' + chr(10)).strip()}`"
    elif hasattr(default, "kind"):  # of other sections each key tells its own
        yield f"default `{default.kind}`"


def _links(pages: dict[str, str]) -> str:
    return "See " + ", ".join(f"[{name}]({page})" for name, page in pages.items()) + "." if pages else ""


# --- the command line


def cli_page() -> str:
    """Every verb with its arguments, options and examples."""
    group: Any = typer.main.get_command(app)
    verbs = list(_verbs(group, "quorate"))
    lines = [f"- [`{path}`](#{path.replace(' ', '-')}): {_first_sentence(verb.help)}" for path, verb in verbs]
    parts = [GENERATED + "\n" + EXAMPLES, "# Command line", "\n".join(lines), CLI_NOTES]
    parts += [part for path, verb in verbs for part in _verb(path, verb)]
    return "\n\n".join(parts) + "\n"


CLI_NOTES = """\
A run is a name, a unique prefix of one, a path, or `last`. Every verb takes `--json`: it prints one document by the
[schemas](../json/README.md), and nothing else, on standard output. `quorate --install-completion` has the shell
complete run names and files. `NO_COLOR` and `FORCE_COLOR` are respected.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | the job failed; its last line is the command that resumes it |
| 2 | the request was wrong, nothing was trained |
| 130 | interrupted, with a checkpoint once a step is done |
| 143 | terminated or terminal closed, with a checkpoint once a step is done |"""


def _verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            yield from _verbs(verb, f"{path} {name}")
        else:
            yield f"{path} {name}", verb


def _verb(path: str, verb: Any) -> Iterator[str]:
    text, _, examples = verb.help.partition("\b\nExamples:\n")
    parameters = [parameter for parameter in verb.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    usage = [f"{each.metavar}" if each.required else f"[{each.metavar}]" for each in arguments]
    yield f"## `{path}`"
    yield f"`{' '.join([path, *usage])}`"
    yield from (" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
    if examples:
        yield f"```sh\n{textwrap.dedent(examples).strip()}\n```"
    listed = [f"- `{each.metavar}`: {_help(each)}" for each in arguments]
    listed += [f"- `{_spelled(each)}`: {_help(each)}" for each in options]
    yield "\n".join(listed)


def _spelled(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag or not option.metavar else f"{names} {option.metavar}"


def _help(parameter: Any) -> str:
    text = " ".join(parameter.help.split())
    default = parameter.default
    if isinstance(parameter.show_default, str):
        text += f" Default: {parameter.show_default}."
    elif parameter.show_default and not callable(default) and default not in (None, False, True, [], (), ""):
        text += f" Default: `{getattr(default, 'value', default)}`."
    return text + (f" Variable: `{parameter.envvar}`." if parameter.envvar else "")


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


# --- Python


def api_page() -> str:
    """Every public name with its signature and what it does."""
    groups: dict[str, list[tuple[str, Any]]] = {"Classes": [], "Functions": [], "Errors": []}
    for name in quorate.__all__:
        value = getattr(quorate, name) if name != "tune" else inspect.unwrap(quorate.tune.search.tune)
        kind = "Functions" if isinstance(value, FunctionType) else "Classes"
        groups["Errors" if inspect.isclass(value) and issubclass(value, Exception) else kind].append((name, value))
    groups["Functions"].append(("ray.trainer", quorate.ray.trainer))
    parts = [GENERATED + "\n" + EXAMPLES, "# Python", API_INTRO]
    for heading, names in groups.items():
        parts += [f"## {heading}", " · ".join(f"[{name}](#{_anchor(name)})" for name, _ in names)]
        parts += [part for name, value in names for part in _public(name, value)]
    return "\n\n".join(parts) + "\n"


API_INTRO = """\
All public names are in the module `quorate`, typed and documented (`help(quorate.Job)`). They are imported when first
used. `quorate.__version__` is the installed version. [Use Quorate from Python](../how-to/python.md) has scripts."""
INTERNAL = {
    "Job": {"of"},
    "Result": {"of"},
    "SearchResult": {"read"},
    "Shards": {"reading_facts", "notes", "is_columns"},
}
INTERNAL["Stream"] = {"bind", "read", "in_words"}
INTERNAL["Shards"] |= {"batch", "blocks_of", "prefetch"}
"""What only Quorate itself calls."""


def _anchor(name: str) -> str:
    return "quorate" + name.replace(".", "").lower()


def _public(name: str, value: Any) -> Iterator[str]:
    yield f"### `quorate.{name}`"
    if not inspect.isclass(value):
        yield _signature(f"quorate.{name}", value)
    elif bases := [base.__name__ for base in value.__bases__ if base.__name__ in quorate.__all__]:
        yield f"A `quorate.{bases[0]}`."
    elif is_dataclass(value):
        yield "Fields: " + ", ".join(f"`{each.name}`" for each in fields(value) if not each.name.startswith("_")) + "."
    elif not issubclass(value, Exception) and value.__init__ is not object.__init__:
        yield _signature(f"quorate.{name}", value)
    yield _markdown(inspect.getdoc(value) or "")
    if inspect.isclass(value) and (members := list(_members(value))):
        yield "\n".join(members)


def _members(value: type) -> Iterator[str]:
    for name, member in vars(value).items():
        function = getattr(member, "fget", getattr(member, "__func__", member))
        is_member = callable(function) or isinstance(member, property)
        if name.startswith("_") or name in INTERNAL.get(value.__name__, ()) or not is_member or not function.__doc__:
            continue
        shown = name if isinstance(member, property) else f"{name}({_brief(function)})"
        text = " ".join(_markdown(inspect.getdoc(function) or "").split("\n\n")[0].split())
        yield f"- `{shown}`: {text}"


def _brief(function: Any) -> str:
    return ", ".join(_stars(each) + each.name for each in list(inspect.signature(function).parameters.values())[1:])


def _signature(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    returns = signature.return_annotation
    result = "" if returns in (None, inspect.Signature.empty) else f" -> {_type(returns)}"
    lines = [f"    {each}," for each in _parameters(signature)]
    inner = "\n".join(["", *lines, ""]) if lines else ""
    return f"```text\n{name}({inner}){result}\n```"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    before: Any = None
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and before is not each.KEYWORD_ONLY:
            yield "*"
        before = each.kind
        default = "" if each.default is each.empty else f" = {each.default!r}"
        kind = "" if each.annotation is each.empty or _stars(each) else f": {_type(each.annotation)}"
        yield f"{_stars(each)}{each.name}{kind}{default}"


def _stars(parameter: inspect.Parameter) -> str:
    return {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")


def _type(annotation: Any) -> str:
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", inspect.formatannotation(annotation))


def _paragraphs(section: type) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(section) or "").split("\n\n"))


def _markdown(text: str) -> str:
    """A docstring as Markdown: examples after `::` become blocks of Python."""
    parts = []
    for part in re.split(r"\n\n+(?=\S)", text.replace("``", "`")):
        if part.startswith("::"):
            code = textwrap.dedent(part.removeprefix("::").strip("\n"))
            parts.append(f"```python\n{code.strip()}\n```")
        else:
            parts.append(part)
    return "\n\n".join(parts)


# --- JSON


def json_page() -> str:
    """Every schema with what it describes."""
    schemas = sorted((DOCS / "json").glob("*.schema.json"))
    titles = {schema.name: json.loads(schema.read_text()).get("title", "") for schema in schemas}
    lines = [f"- [{name}]({name})" + (f": {title}" if title else "") for name, title in titles.items()]
    intro = "# JSON schemas\n\nWhat each verb prints with `--json`, and the lines of `events.jsonl`."
    return "\n\n".join([GENERATED, intro, "\n".join(lines)]) + "\n"


PAGES = {
    "reference/job.md": job_page,
    "reference/cli.md": cli_page,
    "reference/api.md": api_page,
    "json/README.md": json_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
