"""What is secret in a job: values that must never be shown or logged, though the job needs them."""

from collections.abc import Iterator

from quorate.core.masking import secrets_in, url_secrets
from quorate.spec.job import JobSpec


def job_secrets(spec: JobSpec) -> Iterator[str]:
    """Parameters that are named like secrets, the key of its checkpoints, and what a webhook's address gives away."""
    yield from secrets_in(spec.params)
    if spec.notify is not None and spec.notify.webhook:
        yield from url_secrets(spec.notify.webhook)
    if spec.checkpoint.sealing is not None:
        yield from spec.checkpoint.sealing.secrets()
