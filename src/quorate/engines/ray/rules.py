"""What must hold between a Ray cluster and the rest of a job."""

import re
from collections.abc import Iterator

from quorate.core.addresses import has_secret
from quorate.core.errors import Problem
from quorate.core.masking import is_secret
from quorate.engines.ray.option import RaySpec
from quorate.spec.job import JobSpec
from quorate.spec.options import Rules, Said
from quorate.spec.section import AUTO_BATCH

_URL = re.compile(r"\w+://\S+")


def _cluster_fits(job: JobSpec, said: Said) -> Iterator[Problem]:
    engine, device = job.engine, job.device
    if not isinstance(engine, RaySpec):
        return
    if job.batch_size == AUTO_BATCH:
        yield Problem(
            "batch_size",
            f"auto{said('batch_size')} is looked for on this machine, and engine: ray{said('engine')} trains on others",
            "Write a number: `quorate plan` says what fits.",
        )
    for secret in _secret_keys(engine):
        path = f"engine.{secret}"
        yield Problem(
            path,
            f"there is a secret in it{said(path)}, and whoever sees the cluster or the run would read it",
            "Give it to the nodes by other means, in their own environment, pip.conf or netrc; Ray's own token is in "
            "RAY_AUTH_TOKEN.",
        )
    key, gpu = "engine.per_worker.gpu", engine.per_worker.gpu
    if device == "cuda" and gpu == 0:
        text = f"workers without a GPU{said(key)} cannot compute on device: cuda{said('device')}"
        yield Problem(key, text, "Write gpu: 1, or leave it out.")
    if gpu and device == "cpu":
        text = f"{gpu:g}{said(key)} would be held for each worker and not used: device: cpu{said('device')}"
        yield Problem(key, text, "Leave gpu out, or write device: cuda.")
    if gpu and device == "auto" and (what := job.strategy.cpu_only):
        text = f"{gpu:g}{said(key)} would be held for each worker and not used: {what} computes on the CPU"
        yield Problem(key, text, f"Leave gpu out, or {what.partition(':')[0]}.")


def _secret_keys(engine: RaySpec) -> Iterator[str]:
    """The keys with a secret in them. A rule asks for them, and no check of a key: what breaks a rule is not shown."""
    for key in ("address", "storage"):
        if has_secret(getattr(engine, key) or ""):
            yield key
    if any(has_secret(url) for package in engine.runtime_env.pip for url in _URL.findall(package)):
        yield "runtime_env.pip"
    for name, value in engine.runtime_env.env_vars.items():
        if is_secret(name, value) or name.startswith("RAY_AUTH"):
            yield f"runtime_env.env_vars.{name}"


RULES: Rules = {_cluster_fits: frozenset({"engine", "strategy", "device", "batch_size"})}
