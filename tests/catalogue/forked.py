"""The command in a fork of the test, where Python and its imports are there already: it takes a twentieth of the time.

For what is refused before a process is started. Everything else is run as a process of its own.
"""

import logging
import os
import sys
import tempfile
import traceback
from typing import NoReturn

from command import Done, Workplace
from quorate.api import session, train  # noqa: F401 (what verbs import when they are called is imported once, here)
from quorate.cli import errors, main  # noqa: F401
from quorate.spec import load  # noqa: F401


def run_forked(workplace: Workplace, arguments: list[str], environment: dict[str, str]) -> Done:
    """Give a command and wait for its end."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.fork()
        if pid == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            os.chdir(workplace.folder)
            os.environ.update(environment)
            _be_the_command(arguments)
        _, status = os.waitpid(pid, 0)
        stdout.seek(0), stderr.seek(0)
        return Done(os.waitstatus_to_exitcode(status), stdout.read().decode(), stderr.read().decode())


def _be_the_command(arguments: list[str]) -> NoReturn:
    code: object = 1
    try:
        logging.getLogger().handlers.clear()  # those of the test
        sys.argv = ["quorate", *arguments]
        main.run()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
