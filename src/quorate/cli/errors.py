"""How a verb that did not succeed ends: with an error for people, a document for programs, and an exit code.

The document is described by docs/json/error.schema.json.
"""

import difflib
import itertools
import re
import shlex
import sys
import textwrap
import traceback
from dataclasses import asdict
from typing import Any

import typer
from rich.text import Text

from quorate.cli.output import print_document
from quorate.core.errors import JobFileError, OutputError, QuorateError
from quorate.core.failure import STOPPED, JobFailed, Remains
from quorate.core.masking import mask, mask_all
from quorate.core.user_code import describe
from quorate.observe.quantities import visible
from quorate.observe.screen import Screen

INDENT = 2
FLAGS_ELSEWHERE = {
    **dict.fromkeys(("gpus", "devices", "nproc", "nproc_per_node", "num_processes", "world_size"), "--workers "),
    "num_workers": "--set loader_workers=",
}
"""How others call what is set so here."""


def show_error(error: Exception, as_json: bool) -> int:
    """Show why nothing was started, or why a job ended; the exit code."""
    fields: dict[str, Any] = {"error": str(error)}
    match error:
        case typer.TyperException():
            code, fields["error"] = error.exit_code, _show_usage(error)
        case JobFailed():
            code = error.exit_code
            fields = _show_failed_job(error)
        case QuorateError():
            code = error.exit_code
            print_labelled("error", error.message)
            if isinstance(error, JobFileError):
                fields["problems"] = [asdict(problem) | {"keys": list(problem.keys)} for problem in error.problems]
        case _:  # nobody foresaw it: the traceback is for us
            code, fields["error"] = 1, f"Quorate itself has failed: {describe(error)}"
            print(mask("".join(traceback.format_exception(error))), end="", file=sys.stderr)
            print_labelled("error", "Quorate itself failed (see the traceback above); please report it.")
    # Not to where nothing can be written.
    if as_json and not isinstance(error, OutputError):
        fields = mask_all(fields)
        status = STOPPED.get(code) or ("failed" if code == 1 or "failure" in fields else "refused")
        print_document({"status": status, "exit_code": code, **fields})
    return code


def show_next(remains: Remains) -> None:
    """Show what to do about a run that did not complete."""
    print_labelled("next", remains.advice)
    print_labelled("logs", remains.logs)


def _show_usage(error: typer.TyperException) -> str:
    """A mistake on the command line itself, with the verb's usage; what is wrong."""
    context = getattr(error, "ctx", None)
    if placed := _misplaced(error.format_message(), context):
        message = placed
    elif (flag := _unlike_any(error)) is not None:
        message = f"no such option: {flag}{_meant(flag, context)}"
    else:
        message = _plainer(error.format_message())
    if context is None or "\n" in message:  # a verb is missing, and what is shown is the help
        error.show()  # type: ignore[attr-defined]  # every error of the parser has it, but not by its public type
        return "a verb is missing"
    print_labelled("error", message)
    usage = context.get_usage().removeprefix("Usage: ")
    print_labelled("usage", usage.replace("{", "").replace("}", ""))
    print_labelled("help", f"{context.command_path} --help")
    return message


def _misplaced(message: str, context: Any) -> str:
    """Of what a verb has, and what stands before it, or behind it without its flag."""
    if context is not None and context.parent is None and (wrong := re.match(r"No such option: (--[a-z-]+)", message)):
        verbs = getattr(context.command, "commands", {})
        typed = next((word for word in sys.argv[1:] if word in verbs), "VERB")
        known = verbs.values() if typed == "VERB" else [verbs[typed]]
        if any(wrong[1] in option.opts for verb in known for option in verb.params):
            return f"{wrong[1]} stands behind the verb: quorate {typed} … {wrong[1]}"
    number = re.match(r"Got unexpected extra argument\(?s?\)? \((\d+)\)", message)
    if number is not None and any(option.name == "workers" for option in context.command.params):
        return f"unexpected {number[1]}. A number of workers needs its flag: --workers {number[1]}"
    return ""


def _plainer(message: str) -> str:
    """What the parser of the command line says, in our words."""
    wrong = re.match(r"Invalid value for '(--[a-z-]+)': Input should be a valid integer", message)
    if wrong is not None:
        return f'{wrong[1]}: the text "{_typed_for(wrong[1])}" is not a whole number.'
    if (extra := re.match(r"Got unexpected extra argument\(?s?\)? \(([A-Za-z_][\w.]*=[^\s)]+)", message)) is not None:
        key = extra[1] if _is_key(extra[1].partition("=")[0]) else f"params.{extra[1]}"
        return f"unexpected {extra[1]}. A setting needs its flag: --set {shlex.quote(key)}"
    if (verb := re.match(r"No such command '(.*\.ya?ml)'", message)) is not None:
        return f"{verb[1]} is no verb. Did you mean quorate train {verb[1]}?"
    message = re.sub(r" \(Possible options: (.*)\)$", r". Did you mean \1?", message)
    return f"{message[:1].lower()}{message[1:]}"


def _unlike_any(error: typer.TyperException) -> str | None:
    """A flag that there is none of, and that is no misspelt one either: the parser finds some likeness in most."""
    option = getattr(error, "option_name", None)
    known = getattr(error, "possibilities", None)
    is_misspelt = isinstance(option, str) and difflib.get_close_matches(option, known or (), cutoff=0.75)
    return option if isinstance(option, str) and option.startswith("--") and not is_misspelt else None


def _meant(flag: str, context: Any) -> str:
    """What to type for what is no flag, but may be a key of the job or a parameter of the task."""
    if context is None or all(each.name != "settings" for each in context.command.params):
        return ""
    name, value = flag.removeprefix("--").replace("-", "_"), _typed_for(flag) or "VALUE"
    if value.endswith((".yaml", ".yml")):
        return f". The job file needs none: {context.command_path} {value}"
    if name in FLAGS_ELSEWHERE:
        return f". Here it is {FLAGS_ELSEWHERE[name]}{value}"
    if _is_key(name):
        return f". To set this key of the job: --set {shlex.quote(f'{name}={value}')}"
    return f". To set a parameter of the task: --set {shlex.quote(f'params.{name}={value}')}"


def _typed_for(flag: str) -> str:
    """The value that was typed for a flag, if one was."""
    behind = [value for before, value in itertools.pairwise(sys.argv) if before == flag and not value.startswith("--")]
    joined = [word.partition("=")[2] for word in sys.argv if word.startswith(f"{flag}=")]
    return [*behind, *joined, ""][0]


def _is_key(name: str) -> bool:
    """Whether a job has this key."""
    # Only now: it takes its time to import.
    from quorate.spec.job import JobSpec

    return name.partition(".")[0] in JobSpec.model_fields


def _show_failed_job(error: JobFailed) -> dict[str, Any]:
    failure, remains = error.failure, error.remains
    print_labelled("error", failure.message)
    if failure.traceback:
        print(f"\n{mask(failure.traceback)}\n", file=sys.stderr)
    fields: dict[str, Any] = {"error": failure.message, "failure": failure.to_dict()}
    if remains is not None:
        show_next(remains)
        fields |= {"run": remains.run, "folder": remains.folder, "resume": remains.resume}
    return fields


def print_labelled(label: str, text: str) -> None:
    """One labelled text: folded on a terminal, and as it is in a file, where a line can be searched for."""
    screen = Screen(sys.stderr)
    whole = visible(mask(f"{label}: {text}"))
    line = Text(fold(whole, screen.width) if screen.is_terminal else whole)
    line.stylize("bold red" if label == "error" else "bold", 0, len(label) + 1)
    screen.print(line, soft_wrap=True)


def fold(text: str, width: int) -> str:
    """Each line broken to the width, what is broken off being indented; a path or digest is never broken."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip(" "))
        if len(line) > width:
            lines[number] = textwrap.fill(
                line[indent:],
                max(width, indent + 4 * INDENT),
                initial_indent=" " * indent,
                subsequent_indent=" " * (indent + INDENT),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
