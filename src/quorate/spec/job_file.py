"""Reading a job file from disk: what can be wrong before its keys are looked at."""

from pathlib import Path

from quorate.core.errors import JobFileError, Problem, RequestError
from quorate.core.regular_file import read_regular
from quorate.spec.keys import nearest_file
from quorate.spec.yaml_document import Document, read_yaml

SHOWN = 10
_NEEDED = "A job needs at least task, batch_size, and epochs or steps."


def read_job_file(path: Path, *, recorded: bool = False) -> Document:
    """The mapping in a file. Mistakes that leave a mapping to look at are kept in it; all others are raised."""
    document = read_yaml(_text_of(path, recorded))
    if document.value is None and not document.problems:
        document.problems.append(Problem("file", "it is empty", _NEEDED))
    elif not isinstance(document.value, dict) and not document.problems:
        kind = "a list" if isinstance(document.value, list) else f"the single value {document.value!r}"
        document.problems.append(Problem("file", f"it holds {kind} instead of a mapping of keys to values", _NEEDED))
    if not isinstance(document.value, dict):
        raise JobFileError(str(path), document.problems)
    return document


def _text_of(path: Path, recorded: bool) -> str:
    try:
        # What a person names may be a pipe. What a run has recorded is a file: anything else is somebody's trap.
        return (read_regular(path) if recorded else path.read_bytes()).decode("utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"there is no job file {path}.{_meant(path)}") from None
    except NotADirectoryError:
        raise RequestError(f"there is no job file {path}: a part of that path is a file, not a folder.") from None
    except IsADirectoryError:
        raise RequestError(f"{path} is a folder, not a job file.{_job_files_in(path)}") from None
    except UnicodeDecodeError as error:
        problem = Problem(
            "file",
            f"it is not UTF-8 text: the byte at offset {error.start} is {error.object[error.start]:#04x}",
            "Is it a job file? If so, save it as UTF-8.",
        )
        raise JobFileError(str(path), [problem]) from None
    except OSError as error:
        raise RequestError(f"the job file {path} cannot be read: {error.strerror}.") from None


def _meant(path: Path) -> str:
    near = nearest_file(path.name, _yaml_files(path.parent))
    return f" Did you mean {path.with_name(near[0])}?" if near else _job_files_in(path.parent)


def _job_files_in(folder: Path) -> str:
    if not folder.is_dir():
        return f" There is no folder {folder} either."
    names = _yaml_files(folder)
    place = "This folder" if folder == Path() else f"The folder {folder}"
    if not names:
        return f" {place} holds no *.yaml file; `quorate init` writes one."
    return f" {place} holds {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}."


def _yaml_files(folder: Path) -> list[str]:
    # Hidden ones are other tools' settings.
    found = (file.name for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    return sorted(name for name in found if not name.startswith("."))
