"""Interpreters for the processes of a job that are no workers: fork server, coordinator and output pump."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from quorate.engines.engine import Preparation

PARENT = "PARENT"
"""Stands for the number of the process that starts the program."""

Argument = str | socket.socket
"""A word, or a socket that the program has as well: it is told the number."""


class Child(Protocol):
    """A process that was started, with the names that `subprocess.Popen` has for these."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """How it has ended, once that was asked for by `poll` or `wait`."""
        ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Interpreters(Protocol):
    """Runs modules as programs, each in a session of its own: Ctrl-C is for the launcher alone."""

    def start(
        self,
        module: str,
        arguments: Sequence[Argument],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        preparation: Preparation | None = None,
    ) -> Child:
        """Start a program. `preparation` is what it will be asked to prepare, if anything."""
        ...


class FreshInterpreters:
    """A new interpreter for each program."""

    def start(
        self,
        module: str,
        arguments: Sequence[Argument],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        preparation: Preparation | None = None,  # noqa: ARG002 (it imports what it needs by itself)
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *(in_words(each) for each in arguments)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[each.fileno() for each in arguments if isinstance(each, socket.socket)],
            env=environment,
            start_new_session=True,
        )


def in_words(argument: Argument) -> str:
    """As a child of this process is told it, which has the same numbers for its sockets."""
    if isinstance(argument, socket.socket):
        return str(argument.fileno())
    return str(os.getpid()) if argument == PARENT else argument


FRESH = FreshInterpreters()
