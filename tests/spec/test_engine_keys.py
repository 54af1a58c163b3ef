"""The keys that say where a job runs: what they take, what they come to, and that none of them changes the bits."""

from typing import Any

import pytest

from quorate.core.errors import JobFileError
from quorate.engines.ray.option import RaySpec
from quorate.spec.changes import refused_on_resume
from quorate.spec.device import idle_gpus, kind_of, workers_here
from quorate.spec.job import JobSpec, mark_of
from quorate.spec.keys import Mark, keys_of
from quorate.spec.load import resolve_mapping
from quorate.spec.options import LocalSpec
from quorate.spec.override import parse_set
from quorate.spec.resolved import dump_job

JOB: dict[str, Any] = {"task": "a.py:A", "batch_size": 8, "steps": 1}


def job(**keys: Any) -> JobSpec:
    return resolve_mapping({**JOB, **keys}, "job.yaml", {}, []).spec


def ray(**keys: Any) -> RaySpec:
    engine = job(engine={"kind": "ray", **keys}).engine
    assert isinstance(engine, RaySpec)
    return engine


def problems_of(**keys: Any) -> list[str]:
    with pytest.raises(JobFileError) as raised:
        job(**keys)
    return [str(problem) for problem in raised.value.problems]


def test_a_job_runs_here_unless_it_says_otherwise() -> None:
    assert job().engine == job(engine="local").engine == LocalSpec()
    assert job(engine="ray").engine == ray() == RaySpec(kind="ray")


def test_where_a_job_runs_changes_no_bits_and_may_change_on_resume() -> None:
    assert {mark_of(key) for key in keys_of(JobSpec) if key.startswith("engine")} == {Mark.MANNER}
    assert refused_on_resume(job(), job(engine={"kind": "ray", "placement": "spread"})) == ()


def test_layers_may_name_the_kind_and_keys_of_it() -> None:
    layers = [parse_set("engine=ray"), parse_set("engine.address=head:6379"), parse_set("engine.per_worker.cpu=2")]
    resolved = resolve_mapping({**JOB, "engine": "local"}, "job.yaml", {"QUORATE_ENGINE": "ray"}, layers)
    assert resolved.spec.engine == ray(address="head:6379", per_worker={"cpu": 2})
    assert resolved.origins["engine.address"] == "--set engine.address"
    assert "address: head:6379" in dump_job(resolved)


@pytest.mark.parametrize("address", ["auto", "local", "head:6379", "10.0.0.1:6379", "[::1]:6379", "ray://head:10001"])
def test_a_cluster_is_found_by(address: str) -> None:
    assert ray(address=address).address == address


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("rai", 'engine.kind: the text "rai" is not local or ray (job.yaml). Did you mean ray?'),
        ({"address": "auto"}, "engine.kind: it is missing, and it has no default: give local or ray."),
        ({"kind": "local", "address": "auto"}, "engine.address: there is no such key"),
        ({"kind": "ray", "adress": "auto"}, "Did you mean engine.address?"),
        ({"kind": "ray", "address": "head"}, "Add the port, 6379 where nothing else was chosen: head:6379."),
        ({"kind": "ray", "address": "ray://head"}, "Add the port, 10001"),
        ({"kind": "ray", "address": "head:70000"}, "A port is from 1 to 65535"),
        ({"kind": "ray", "address": "http://head:8265"}, "write ray://head:8265"),
        ({"kind": "ray", "placement": "strict-spread"}, "Did you mean strict_spread?"),
        ({"kind": "ray", "per_worker": {"cpus": 2}}, "Did you mean engine.per_worker.cpu?"),
        ({"kind": "ray", "per_worker": {"cpu": 0}}, "engine.per_worker.cpu: 0 is not a number above 0"),
        ({"kind": "ray", "per_worker": {"gpu": 2}}, "engine.per_worker.gpu: 2 is not a number from 0 to 1"),
        ({"kind": "ray", "storage": "shared"}, "write an absolute path, such as /mnt/shared"),
        ({"kind": "ray", "runtime_env": {"pip": "numpy"}}, "is not a list of packages for pip"),
        ({"kind": "ray", "runtime_env": {"pips": []}}, "Did you mean engine.runtime_env.pip?"),
        ({"kind": "ray", "runtime_env": {"env_vars": {"a b": "1"}}}, "'a b' is no name of a variable"),
    ],
    ids=str,
)
def test_each_mistake_says_what_to_write(engine: Any, words: str) -> None:
    (problem,) = problems_of(engine=engine)
    assert words in problem


def test_all_mistakes_are_told_at_once() -> None:
    wrong = {"kind": "ray", "address": "head", "placement": "wide", "per_worker": {"cpu": -1}, "storage": "here"}
    told = problems_of(engine=wrong, steps=0)
    paths = {"engine.address", "engine.placement", "engine.per_worker.cpu", "engine.storage", "steps"}
    assert {problem.split(":")[0] for problem in told} == paths


@pytest.mark.parametrize(
    "engine",
    [
        {"address": "ray://me:s3cret@head:10001"},
        {"storage": "s3://me:s3cret@bucket/runs"},
        {"runtime_env": {"env_vars": {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef"}}},
        {"runtime_env": {"env_vars": {"RAY_AUTH_TOKEN": "short"}}},
        {"runtime_env": {"pip": ["--extra-index-url https://me:s3cret@packages.example", "numpy"]}},
        {"runtime_env": {"pip": ["thing @ git+https://me:s3cret@git.example/thing.git"]}},
    ],
    ids=str,
)
def test_a_secret_is_refused_where_all_of_the_cluster_would_read_it(engine: dict[str, Any]) -> None:
    (problem,) = problems_of(engine={"kind": "ray", **engine})
    assert "whoever sees the cluster" in problem
    assert "s3cret" not in problem
    assert "0123456789abcdef" not in problem


def test_what_is_no_secret_passes() -> None:
    env = {"pip": ["torch @ https://packages.example/torch.whl", "numpy>=2"], "env_vars": {"HF_HOME": "/mnt/models"}}
    assert ray(runtime_env=env).runtime_env.pip == env["pip"]


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"batch_size": "auto"}, "batch_size", "is looked for on this machine"),
        ({"device": "cuda", "gpu": 0}, "engine.per_worker.gpu", "cannot compute on device: cuda"),
        ({"device": "cpu", "gpu": 1}, "engine.per_worker.gpu", "not used: device: cpu"),
    ],
    ids=str,
)
def test_what_a_cluster_cannot_do_is_refused(keys: dict[str, Any], path: str, words: str) -> None:
    keys = dict(keys)
    (problem,) = problems_of(engine={"kind": "ray", "per_worker": {"gpu": keys.pop("gpu", None)}}, **keys)
    assert problem.startswith(f"{path}:")
    assert words in problem


@pytest.mark.parametrize(
    ("keys", "per_worker", "expected", "kind"),
    [
        ({}, {}, {"CPU": 1.0}, "cpu"),
        ({"threads": 4}, {}, {"CPU": 4.0}, "cpu"),
        ({"threads": 4}, {"cpu": 0.5}, {"CPU": 0.5}, "cpu"),
        ({"device": "cuda"}, {}, {"CPU": 1.0, "GPU": 1.0}, "cuda"),
        ({}, {"gpu": 1}, {"CPU": 1.0, "GPU": 1.0}, "cuda"),
        ({}, {"gpu": 0.25}, {"CPU": 1.0, "GPU": 0.25}, "cuda"),
    ],
    ids=str,
)
@pytest.mark.parametrize("gpus", [0, 2])
def test_what_a_worker_gets_is_a_matter_of_the_job_and_not_of_this_machine(
    keys: dict[str, Any],
    per_worker: dict[str, Any],
    expected: dict[str, float],
    kind: str,
    gpus: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quorate.spec.device.gpus_here", lambda: tuple(map(str, range(gpus))))
    monkeypatch.setattr("quorate.spec.device.torch_has_cuda", lambda: True)
    spec = job(engine={"kind": "ray", "per_worker": per_worker}, **keys)
    assert isinstance(spec.engine, RaySpec)
    assert spec.engine.resources_each(spec.device, spec.threads) == expected
    assert kind_of(spec) == kind
    assert idle_gpus(spec, 1) is None
    assert workers_here(spec, cores=2) == spec.lanes  # and not as many as there are cores or GPUs here


def test_a_number_of_workers_is_taken_as_it_is() -> None:
    assert workers_here(job(engine="ray", workers=3), cores=2) == 3


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"workers": 2, "min_workers": 2}, "there is nothing to choose between min_workers 2 and workers 2"),
        ({"strategy": "fsdp", "workers": 2}, "strategy: fsdp (job.yaml) keeps its number of workers"),
        ({"grow": {"efficiency": 0}}, "engine.grow.efficiency: 0 is not a fraction above 0 and at most 1"),
        ({"grow": {"eficiency": 0.5}}, "Did you mean engine.grow.efficiency?"),
    ],
    ids=str,
)
def test_a_job_that_cannot_grow_as_it_says_is_refused(keys: dict[str, Any], words: str) -> None:
    keys = dict(keys)
    (problem,) = problems_of(engine={"kind": "local", "grow": keys.pop("grow", {})}, **keys)
    assert words in problem
