"""A job as its run folder keeps it."""

import json

from quorate.core.errors import RequestError
from quorate.spec.resolved import ResolvedJob, dump_job


def job_text(resolved: ResolvedJob) -> str:
    """The content of a run's `job.yaml`; refused if it could not be read again."""
    # YAML is UTF-8, and a path of Linux may be anything: the run would pass for damaged as soon as it had ended.
    for key, value in {**resolved.spec.model_dump(), "job file": resolved.source}.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{key}: {value!r} is not UTF-8, which a run needs to keep its job. Rename that folder or file."
            ) from None
    return dump_job(resolved)
