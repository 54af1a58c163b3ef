"""What is secret in a job: values that must never be shown or logged, though the job needs them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from quorate.core.masking import secrets_in, url_secrets
from quorate.core.regular_file import read_regular
from quorate.spec.job import JobSpec

_LONGEST_KEY = 256


def job_secrets(spec: JobSpec) -> Iterator[str]:
    """Parameters that are named like secrets, the key of its checkpoints, and what a webhook's address gives away."""
    yield from secrets_in(spec.params)
    if spec.notify is not None and spec.notify.webhook:
        yield from url_secrets(spec.notify.webhook)
    encrypt = spec.checkpoint.encrypt
    if encrypt is not None and encrypt.key_env:
        yield os.environ.get(encrypt.key_env, "")
    if encrypt is not None and encrypt.key_file:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # a key may be plain bytes, which nobody prints
            yield read_regular(Path(encrypt.key_file).expanduser())[:_LONGEST_KEY].decode("ascii")
