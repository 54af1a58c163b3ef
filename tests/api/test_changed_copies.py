"""A copy that somebody has changed who can write to its place and nothing else, and a person who resumes from it.

Whatever is in it, none of his code runs, nothing is sent or written where he says, and what is not used is told.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from typer.testing import CliRunner

from quorate.api import session
from quorate.api.detached import submit_resume
from quorate.api.evaluate import Asked, evaluate, evaluate_run
from quorate.api.fetch import NAMING, fetch_run
from quorate.api.prints import NoDisplay
from quorate.api.recorded_run import recorded_environment, recorded_job
from quorate.api.result import open_run
from quorate.api.tasks import TaskLocation, find_task, keep_task
from quorate.checkpoint.listing import read_manifest
from quorate.checkpoint.manifest import MANIFEST, Manifest, Part
from quorate.checkpoint.store import CheckpointFolder
from quorate.cli.app import app
from quorate.core.errors import DamagedFileError, QuorateError, RequestError, RunError
from quorate.core.task_source import TaskSource
from quorate.encryption.key import read_key
from quorate.history.run_record import RunRecord, Status
from quorate.spec.job import JobSpec
from quorate.spec.keys import keys_of
from quorate.spec.load import load_recorded
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder
from quorate.stores.place import FolderPlace
from quorate.stores.transfer import copy_checkpoints
from quorate.supervisor.supervisor import Launch
from quorate.tune.search import recorded
from stores.copied_run import make_source, save
from webhook_receiver import Receiver

TASK = """import quorate
class Tiny(quorate.Task):
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
"""
BEGUN = "as far as the first step"
HARMLESS = """
    version name task params lanes threads batch_size epochs steps seed accumulate clip_norm schedule average last_batch
    evaluate early_stop lineage on_nonfinite_loss on_out_of_memory on_bad_sample device precision loss_scale compile
    memory deterministic bucket_mb strategy workers min_workers spares failure_timeout step_timeout setup_timeout
    balance runs checkpoint loader_workers loader_prefetch links capture overlap nccl check_gradients audit record
    train_metrics_every port log_level reuse checkpoint.every checkpoint.minutes checkpoint.keep checkpoint.keep_every
    checkpoint.source checkpoint.when_busy checkpoint.digest
"""
"""Keys of a job that name nothing. A new key is put here, or among those that are not used of a copy (`NAMING`)."""


def test_every_key_of_a_job_is_one_that_names_something_or_not() -> None:
    keys = {key for key in keys_of(JobSpec) if "." not in key or key.startswith("checkpoint.")}
    assert {key for key in keys if key.count(".") < 2} == {*HARMLESS.split(), *NAMING}


@dataclass
class Copied:
    """A copy of a run, beside which somebody lies in wait; and the working folder of a person who resumes from it."""

    root: Path
    server: Receiver
    is_sealed: bool
    launched: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.victim, self.outside = self.root / "victim", self.root / "outside"
        self.proof, self.wanted = self.root / "proof", self.root / "wanted"
        self.backup = self.victim / "backup"
        for folder in (self.backup, self.outside, self.wanted):
            folder.mkdir(parents=True)
        (self.victim / "task.py").write_text(TASK)
        self.evil = f"open({str(self.proof)!r}, 'w').close()\n".encode()
        (self.outside / "evil.py").write_bytes(self.evil)
        self.key = self.root / "key"
        self.key.write_text("ab" * 32)
        encrypt = f", encrypt: {{key_file: {self.key}}}" if self.is_sealed else ""
        keys = f"name: tiny\ncheckpoint: {{to: [checkpoints, {self.backup}], source: false{encrypt}}}\n"
        source = replace(make_source(self.root / "runs", keys=keys), with_source=False)
        job = load_recorded(source.run.job_file, {}, []).spec.model_dump(mode="json")
        cipher = read_key({"key_file": str(self.key)}) if self.is_sealed else None
        checkpoints = CheckpointFolder(source.run.checkpoints, cipher=cipher)
        for step in (2, 4):
            save(source, step, folder=checkpoints, job=job)
        self.folder = self.backup / source.run.name
        copy_checkpoints(source, FolderPlace(self.folder))
        self.newest, self.job_file = self.folder / "step-00000004", self.folder / "job.yaml"
        self.original = self.job_file.read_text()

    @property
    def given(self) -> list[Override]:
        """What the person says: the key, if there is one."""
        key = Override("checkpoint.encrypt", {"key_file": str(self.key)}, "--set checkpoint.encrypt")
        return [key] if self.is_sealed else []

    def set(self, **keys: Any) -> None:
        """Write other values into the job of the copy."""
        job = load_recorded(self.job_file, {}, []).spec.model_dump(mode="json")
        checkpoint = {**job["checkpoint"], **keys.pop("checkpoint", {})}
        self.job_file.write_text(json.dumps({**job, **keys, "checkpoint": checkpoint}))

    def manifest(self, change: Callable[[Manifest], Manifest]) -> None:
        (self.newest / MANIFEST).write_text(change(read_manifest(self.newest)).to_json())

    def add_part(self, name: str) -> None:
        """A file of his among the parts of the newest checkpoint."""
        part = Part(name, len(self.evil), f"xxh3-128:{xxhash.xxh3_128(self.evil).hexdigest()}")
        target = self.newest / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.evil)
        self.manifest(lambda present: replace(present, parts=(*present.parts, part)))

    def resume(self, reference: str = "", overrides: Sequence[Override] | None = None, **trust: bool) -> None:
        """What the person does, up to the first step: the task is imported, callbacks and notices are set up, and
        those who copy have begun; and then the job fails, which is told to whoever is to be notified."""

        def runner(launch: Launch, *_: Any) -> Any:
            with TaskLocation(launch.task or "").loaded(0):
                self.launched.append(launch)
            raise RunError(BEGUN)

        session.resume(
            Path("runs"),
            reference or "backup/tiny-0001",
            {},
            [Override("steps", 8, "--steps"), *(self.given if overrides is None else overrides)],
            watch=lambda _: NoDisplay(),
            runner=runner,
            **trust,
        )

    def assert_unharmed(self) -> None:
        assert not self.proof.exists(), "his code has run"
        assert not self.server.bodies, "he was told something"
        assert not [each for each in self.wanted.iterdir() if each.name != "inner"], (
            "something was written where he says"
        )
        assert "this" not in sys.modules


@pytest.fixture
def server() -> Iterator[Receiver]:
    server = Receiver([200] * 20)
    yield server
    server.shutdown()
    server.server_close()


plain = pytest.mark.parametrize("copied", [False], indirect=True, ids=["plain"])
sealed = pytest.mark.parametrize("copied", [True], indirect=True, ids=["sealed"])


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def copied(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: Receiver) -> Copied:
    victim = tmp_path / "victim"
    victim.mkdir()
    monkeypatch.chdir(victim)
    monkeypatch.syspath_prepend(str(victim))  # as for whoever starts Python there
    return Copied(tmp_path, server, is_sealed=request.param)


def task(where: str) -> Callable[[Copied], None]:
    """The job names a task that is not of the project."""
    return lambda copied: copied.set(task=where.format(root=copied.root))


def part_as(key: str) -> Callable[[Copied], None]:
    """A file among the parts of the newest checkpoint, which the job names."""

    def change(copied: Copied) -> None:
        copied.add_part("evil.py")
        where = "runs/tiny-0001/checkpoints/step-00000004/evil.py:Tiny"
        copied.set(**{key: where if key == "task" else [where]})

    return change


def beside(name: str, by: str = "") -> Callable[[Copied], None]:
    """A file in the place of the copies, which lies under the working folder, as the task."""

    def change(copied: Copied) -> None:
        (copied.backup / name).parent.mkdir(exist_ok=True)
        (copied.backup / name).write_bytes(copied.evil)
        (copied.folder / "link.py").symlink_to(copied.outside / "evil.py")
        copied.set(task=f"{by or f'backup/{name}'}:Tiny")

    return change


def keys(**given: Any) -> Callable[[Copied], None]:
    """Keys of the job; a function is asked for its value."""
    return lambda copied: copied.set(**{key: each(copied) if callable(each) else each for key, each in given.items()})


def commented(copied: Copied) -> None:
    """As if the person had said it himself."""
    evil = f"callbacks: [{copied.outside}/evil.py:Tiny]  # --set callbacks\n"
    copied.job_file.write_text(copied.original.replace("callbacks: []", evil.rstrip()))


def link_to_wanted(copied: Copied) -> None:
    """A link that leads to the place itself while it is looked at."""
    (copied.folder / "link").symlink_to(copied.backup)
    copied.set(checkpoint={"to": ["checkpoints", f"{copied.folder}/link"]})


def above_a_link(copied: Copied) -> None:
    """By its text it is the place itself, and the system goes elsewhere."""
    (copied.wanted / "inner").mkdir()
    (copied.backup / "evil").symlink_to(copied.wanted / "inner")
    copied.set(checkpoint={"to": ["checkpoints", f"{copied.backup}/evil/.."]})


def ray(**engine: Any) -> Callable[[Copied], None]:
    return lambda copied: copied.set(
        engine={
            "kind": "ray",
            **{key: each.format(root=copied.root) if isinstance(each, str) else each for key, each in engine.items()},
        }
    )


def write(file: Path, text: str) -> None:
    file.write_text(text)


def other_run(copied: Copied) -> None:
    origin = {"run": "../outside", "created": "2026-01-01T00:00:00+00:00"}
    (copied.folder / "origin.json").write_text(json.dumps(origin))


NAMED = r"so what it names is not used:\n.*{}: .*\nTo resume, .*--set {}=VALUE; or add --trust-job"
TASK_NOT_HERE = r"(is named by a job from .* and is not of the project here|is not here)\. Name the task by --task"


def told(key: str) -> str:
    return NAMED.format(key, key).replace(".to", r"\.to")


REFUSED: dict[str, tuple[Callable[[Copied], None], str]] = {
    "task among the parts": (part_as("task"), TASK_NOT_HERE),
    "callback among the parts": (part_as("callbacks"), told("callbacks")),
    "task in the copy": (beside("tiny-0001/evil.py"), TASK_NOT_HERE),
    "task beside the copy": (beside("evil.py"), TASK_NOT_HERE),
    "task in a folder beside the copy": (beside("other/evil.py"), TASK_NOT_HERE),
    "task by a link": (beside("evil.py", "backup/tiny-0001/link.py"), TASK_NOT_HERE),
    "task elsewhere": (task("{root}/outside/evil.py:Tiny"), TASK_NOT_HERE),
    "task above": (task("../outside/evil.py:Tiny"), TASK_NOT_HERE),
    "task by the module of a copy": (beside("evil.py", "backup.evil"), TASK_NOT_HERE),
    "task of Python's own modules": (task("this:Tiny"), TASK_NOT_HERE),
    "task that nobody finds": (task("no_such_module:Tiny"), TASK_NOT_HERE),
    "callback elsewhere": (keys(callbacks=lambda copied: [f"{copied.outside}/evil.py:Tiny"]), told("callbacks")),
    "callback of the project": (keys(callbacks=["task.py:Tiny"]), told("callbacks")),
    "callback by a module": (keys(callbacks=["this:Tiny"]), told("callbacks")),
    "callback with a comment": (commented, told("callbacks")),
    "command": (keys(notify=lambda copied: {"command": f"touch {copied.proof}"}), told("notify")),
    "webhook": (keys(notify=lambda copied: {"webhook": copied.server.url}), told("notify")),
    "mlflow": (keys(track=lambda copied: {"mlflow": copied.server.url}), told("track")),
    "collector": (keys(track=lambda copied: {"trace": {"otlp": copied.server.url}}), told("track")),
    "listener": (keys(track={"prometheus": "0.0.0.0:0"}), told("track")),
    "wandb": (keys(track={"wandb": "online"}), told("track")),
    "another place": (
        keys(checkpoint=lambda copied: {"to": ["checkpoints", str(copied.wanted)]}),
        told("checkpoint.to"),
    ),
    "one place more": (
        keys(checkpoint=lambda copied: {"to": ["checkpoints", str(copied.backup), str(copied.wanted)]}),
        told("checkpoint.to"),
    ),
    "a place by a link": (link_to_wanted, told("checkpoint.to")),
    "a place above a link": (above_a_link, told("checkpoint.to")),
    "a storage above a link": (ray(storage="{root}/victim/backup/evil/.."), told("engine")),
    "a store": (keys(checkpoint={"to": ["checkpoints", "s3://his/bucket"]}), told("checkpoint.to")),
    "ray": (ray(), told("engine")),
    "his ray": (ray(address="ray://his.example:10001"), told("engine")),
    "his storage": (ray(storage="{root}/wanted"), told("engine")),
    "variables on ray": (ray(storage="{root}/victim/backup", runtime_env={"env_vars": {"A": "b"}}), told("engine")),
    "ray elsewhere": (ray(storage="{root}/victim/backup", address="his.example:6379"), told("engine")),
    "no encryption between hosts": (keys(encrypt=False), told("encrypt")),
    "no job": (lambda copied: copied.job_file.unlink(), "has no job.yaml"),
    "no keys": (lambda copied: write(copied.job_file, "[]"), "instead of a mapping"),
    "a run elsewhere": (other_run, "not the name of a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_somebody_names_in_a_copy_is_refused_and_told(
    copied: Copied, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = REFUSED[name]
    change(copied)
    if copied.is_sealed and words == TASK_NOT_HERE:
        begun(copied)
        assert copied.launched[0].task == f"{copied.victim}/task.py:Tiny", "which the key authenticates"
        assert "is not what the key authenticates" in caplog.text and "task: " in caplog.text
        copied.assert_unharmed()
        return
    for _ in range(2):  # a run that was fetched remembers it
        with pytest.raises(QuorateError, match=f"(?s){words}"):
            copied.resume()
    assert not copied.launched
    copied.assert_unharmed()
    for run in RunFolder.all_in(Path("runs")):  # fetched, and refused for its task: other verbs take no more of it
        spec = recorded_job(run).spec
        assert (spec.callbacks, spec.notify, spec.track, spec.engine.kind) == ([], None, None, "local")
        assert spec.checkpoint.to[1:] in ([], [str(copied.backup)])
        for reference in (str(run.path), run.name):
            with pytest.raises(RunError, match=TASK_NOT_HERE):
                copied.resume(reference)
        with pytest.raises(RunError, match=TASK_NOT_HERE):
            find_task(run, spec.task)
        run.job_file.unlink()
        with pytest.raises(RunError, match=r"was fetched from .*remove the run's folder and resume from there again"):
            copied.resume(run.name)


@pytest.mark.parametrize(
    "change",
    [
        lambda copied: copied.add_part("evil.py"),
        lambda copied: copied.add_part("__init__.py"),
        lambda copied: copied.add_part("source/index.json"),
        lambda copied: copied.add_part("job.yaml"),
        lambda copied: copied.manifest(lambda present: replace(present, job={**present.job, "notify": {"on": ["x"]}})),
        lambda copied: copied.manifest(
            lambda present: replace(present, encryption={"cipher": "aes-256-gcm", "key": "x"})
        ),
        lambda copied: copied.manifest(lambda present: replace(present, parts=())),
    ],
    ids=["code", "a package", "a source", "a page", "a job", "a cipher", "no parts"],
)
def test_a_manifest_of_his_is_not_taken_or_does_nothing(
    copied: Copied, change: Callable[[Copied], None], caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    change(copied)
    with pytest.raises(RunError, match=BEGUN):
        copied.resume()
    step = copied.launched[0].checkpoint.name if copied.launched[0].checkpoint else ""
    is_plain_data = not copied.is_sealed and request.node.callspec.id.startswith(("plain-a job", "plain-no parts"))
    assert step == ("step-00000004" if is_plain_data else "step-00000002")
    assert is_plain_data or "the copy of step-00000004" in caplog.text
    assert copied.launched[0].spec.notify is None
    copied.assert_unharmed()


def begun(copied: Copied, reference: str = "", overrides: Sequence[Override] | None = None, **trust: bool) -> JobSpec:
    """The job that is trained when it is resumed."""
    with pytest.raises(RunError, match=BEGUN):
        copied.resume(reference, overrides, **trust)
    return copied.launched[-1].spec


def test_an_honest_copy_is_resumed_as_before(copied: Copied, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_recorded(copied.job_file, {}, []).spec
    copied.set(task=f"{copied.victim}/task.py:Tiny")
    for reference in ("backup/tiny-0001", f"{copied.folder}/", f"file://{copied.folder}"):
        shutil.rmtree("runs", ignore_errors=True)
        assert begun(copied, reference) == expected
    run = RunFolder(copied.victim / "runs/tiny-0001")
    assert copied.launched[-1].task == f"{copied.victim}/task.py:Tiny"
    assert not caplog.records
    assert begun(copied, "tiny-0001") == expected, "and by its name"
    assert recorded_job(run).spec == expected, "with the key of the person"


def test_what_a_person_says_is_used_in_its_place(copied: Copied) -> None:
    keys(
        callbacks=["task.py:Tiny"],
        notify=lambda each: {"webhook": each.server.url, "command": f"touch {each.proof}"},
        track={"mlflow": "http://his.example:5000"},
        engine={"kind": "ray", "address": "his.example:6379"},
        checkpoint=lambda each: {"to": ["checkpoints", str(each.wanted)]},
    )(copied)
    with pytest.raises(RunError) as refused:
        copied.resume()
    assert all(f"\n  {key}: " in refused.value.message for key in ("callbacks", "notify", "track", "engine"))
    assert "webhook: 'http://127.0.0.1" in refused.value.message and "a-secret-path" not in refused.value.message
    mine = {"callbacks": [], "notify": None, "track": None, "engine": "local", "checkpoint.to": ["checkpoints"]}
    said = [Override(key, value, f"--set {key}") for key, value in mine.items()]
    for left_out in said:
        with pytest.raises(RunError, match=rf"(?s)not used:\n  {left_out.key}: [^\n]*\nTo resume"):
            copied.resume("", [*copied.given, *(each for each in said if each is not left_out)])
    with pytest.raises(RunError, match=r"not used:\n  track: .*mlflow"):
        part = Override("track.every", 5, "--set track.every")
        copied.resume("", [*copied.given, part, *(each for each in said if each.key != "track")])
    spec = begun(copied, "", [*copied.given, *said])
    assert (spec.callbacks, spec.notify, spec.track, spec.engine.kind) == ([], None, None, "local")
    assert spec.checkpoint.to == ["checkpoints"]
    environment = {"QUORATE_NOTIFY": "null"}
    others = [*copied.given, *(each for each in said if each.key != "notify")]
    assert fetch_run(copied.root / "again", str(copied.folder), environment, others).path.is_dir()
    copied.assert_unharmed()


def test_with_trust_in_its_job_that_is_used_but_never_its_key(copied: Copied, caplog: pytest.LogCaptureFixture) -> None:
    other = {"to": ["checkpoints", str(copied.backup), str(copied.wanted)]}
    copied.set(notify={"command": "true"}, checkpoint=other)
    spec = begun(copied, trust_job=True)
    if copied.is_sealed:
        assert spec.notify is None, "only what the key authenticates"
        assert "is not what the key authenticates" in caplog.text and "notify" in caplog.text
        copied.assert_unharmed()
        with pytest.raises(RunError, match=r"not used:\n  checkpoint.encrypt: .*\nTo resume, name the key yourself"):
            fetch_run(copied.root / "again", str(copied.folder), trust_job=True)
    else:
        assert spec.notify is not None and spec.checkpoint.to == other["to"]


@pytest.mark.parametrize("place", ["key_file", "key_env"])
def test_a_key_is_only_that_of_the_person(copied: Copied, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIS_KEY", "ab" * 32)
    value = {"key_file": str(copied.key), "key_env": "HIS_KEY"}[place]
    copied.set(checkpoint={"encrypt": {place: value}})
    for trust_job in (False, True):
        with pytest.raises(
            RunError, match=rf"  checkpoint.encrypt: .*{value}.*\nTo resume, name the key yourself: --set"
        ):
            copied.resume("", [], trust_job=trust_job)
    assert not Path("runs/tiny-0001").exists()


@sealed
def test_with_a_key_nothing_plain_is_accepted(copied: Copied, tmp_path: Path) -> None:
    """All that is encrypted is gone, and so is the key from the job: only the person knows that there was one."""
    plain = Copied(tmp_path / "plain", copied.server, is_sealed=False)
    for step in ("step-00000002", "step-00000004"):
        shutil.rmtree(copied.folder / step)
        shutil.copytree(plain.folder / step, copied.folder / step)
    copied.set(checkpoint={"encrypt": None})
    with pytest.raises(RunError, match=r"is not encrypted, although `checkpoint\.encrypt` asks for that"):
        copied.resume()
    assert not Path("runs/tiny-0001").exists()


@plain
def test_without_a_key_a_job_that_means_something_else_is_refused(copied: Copied) -> None:
    copied.set(seed=99)
    with pytest.raises(RunError, match="was changed since checkpoint step-00000004 was saved"):
        copied.resume()


@sealed
def test_with_a_key_the_job_and_its_environment_are_those_of_the_checkpoint(
    copied: Copied, caplog: pytest.LogCaptureFixture
) -> None:
    copied.set(params={"data": "/etc/passwd"}, seed=99, log_level="debug")
    (copied.folder / "environment.json").write_text('{"torch": "his"}')
    spec, run = begun(copied), RunFolder(Path("runs/tiny-0001"))
    assert (spec.params, spec.seed, spec.log_level) == ({}, 0, "info")
    assert recorded_environment(run, None) == {"torch": "2"}
    assert "is not what the key authenticates; that of checkpoint step-00000004 is used" in caplog.text
    assert "seed: 99 → 0" in caplog.text


@plain
def test_a_run_that_is_here_keeps_its_own_job_whatever_comes_with_a_copy(copied: Copied) -> None:
    """Also where its job.yaml is gone, and the newest checkpoint is one that was fetched."""
    shutil.copytree(copied.root / "runs", "runs")
    run = RunFolder(copied.victim / "runs/tiny-0001")
    for entry in run.checkpoints.glob("step-00000004*"):
        shutil.rmtree(entry)
    run.job_file.unlink()
    notify = {"command": f"touch {copied.proof}"}
    copied.manifest(lambda present: replace(present, job={**present.job, "notify": notify}))
    assert begun(copied).notify is None
    assert begun(copied, "tiny-0001").notify is None
    copied.assert_unharmed()


@plain
def test_a_trusted_source_stays_the_task_although_a_file_is_where_the_job_says(copied: Copied) -> None:
    copied.set(task=f"{copied.outside}/evil.py:Tiny")
    code = TaskSource("task.py", {"task.py": TASK.encode()})
    page = {"found_at": None, "source": json.loads(code.to_json())}
    (copied.folder / "source.json").write_text(json.dumps(page))
    with pytest.raises(
        RunError, match=r"not of the project here, and resuming would run the source at .*--trust-source"
    ):
        copied.resume()
    begun(copied, trust_source=True)
    run = RunFolder(copied.victim / "runs/tiny-0001")
    assert copied.launched[-1].task == f"{run.path}/source/task.py:Tiny"
    recorded = recorded_job(run).spec.task
    place = find_task(run, recorded)
    branch = RunFolder.create(Path("runs").absolute(), "tiny")
    keep_task(branch, recorded, code, place)
    assert place.kept is not None and find_task(branch, recorded).kept is not None, "also in a branch, which is no copy"
    copied.assert_unharmed()


@plain
def test_a_task_that_the_person_names_is_used_wherever_it_lies(copied: Copied) -> None:
    (copied.outside / "mine.py").write_text(TASK)
    copied.set(task=f"{copied.outside}/mine.py:Tiny")
    with pytest.raises(RunError, match=TASK_NOT_HERE):
        copied.resume()
    named = Override("task", f"{copied.outside}/mine.py:Tiny", "--task")
    begun(copied, "", [*copied.given, named])
    assert copied.launched[-1].task == f"{copied.outside}/mine.py:Tiny"
    begun(copied, "tiny-0001", [*copied.given, named])


@plain
def test_copies_that_lie_in_the_storage_of_a_cluster_may_name_it(copied: Copied) -> None:
    copied.set(engine={"kind": "ray", "storage": str(copied.backup), "placement": "spread"})
    fetched = fetch_run(Path("runs"), str(copied.folder), {}, copied.given)
    assert recorded_job(RunFolder(fetched.path)).spec.engine.model_dump()["storage"] == str(copied.backup)


def dressed(copied: Copied) -> None:
    """The copy as if it were a run, which names code of his."""
    (copied.folder / "origin.json").unlink()
    (copied.folder / "checkpoints").mkdir()
    for step in copied.folder.glob("step-*"):
        step.rename(copied.folder / "checkpoints" / step.name)
    (copied.outside / "evil.py").write_bytes(copied.evil + TASK.encode())
    evil = f"{copied.outside}/evil.py:Tiny"
    copied.set(task=evil, callbacks=[evil], checkpoint={"to": ["checkpoints"]})


@plain
@pytest.mark.parametrize("shared", ["tiny-0001", "."], ids=["the copy", "its place"])
def test_a_copy_that_looks_like_a_run_is_not_resumed_where_others_can_write(copied: Copied, shared: str) -> None:
    dressed(copied)
    (copied.backup / shared).chmod(0o777)
    with pytest.raises(RunError, match=r"others can write to .*may be anybody's.*--trust-job, or .*--runs"):
        copied.resume()
    assert not copied.launched
    copied.assert_unharmed()
    with pytest.raises(QuorateError):  # whatever his code does
        copied.resume(trust_job=True)
    assert copied.proof.exists(), "which is what this is about"


def eval_it(run: str, trust: bool) -> None:
    evaluate(run, trust_job=trust)


def load_it(run: str, trust: bool) -> None:
    open_run(run).load_model(trust_job=trust)


def by_verb(*words: str) -> Callable[[str, bool], None]:
    def call(run: str, trust: bool) -> None:
        arguments = [run if word == "RUN" else word for word in words] + ["--trust-job"] * trust
        raised = CliRunner().invoke(app, arguments).exception
        assert raised is not None
        raise raised

    return call


READERS = {
    "quorate.evaluate": eval_it,
    "load_model": load_it,
    "eval": by_verb("eval", "RUN"),
    "checkpoints export": by_verb("checkpoints", "export", "RUN", "model.pt"),
    "models register": by_verb("models", "register", "RUN"),
    "track": by_verb("track", "RUN", "--tensorboard"),
    "diff --tensor": by_verb("diff", "RUN", "RUN", "--tensor"),
}


@plain
@pytest.mark.parametrize("use", READERS.values(), ids=READERS)
def test_whoever_loads_the_task_of_a_run_refuses_that_of_a_copy_that_looks_like_one(
    copied: Copied, use: Callable[[str, bool], None]
) -> None:
    dressed(copied)
    copied.folder.chmod(0o777)
    with pytest.raises(RunError, match=r"others can write to .*may be anybody's.*--trust-job, or .*--runs"):
        use("backup/tiny-0001", False)
    copied.assert_unharmed()


@plain
@pytest.mark.parametrize("name", ["quorate.evaluate", "load_model", "checkpoints export"])
def test_the_task_of_a_run_that_others_can_write_is_loaded_for_whoever_trusts_it(copied: Copied, name: str) -> None:
    dressed(copied)
    copied.folder.chmod(0o777)
    with pytest.raises(BaseException, match=r".*") as raised:  # whatever his code does
        READERS[name]("backup/tiny-0001", True)
    assert "anybody" not in str(raised.value)
    assert copied.proof.exists(), "which is what this is about"


@plain
def test_the_folder_of_runs_in_use_is_trusted_and_so_is_a_task_that_the_person_names(copied: Copied) -> None:
    dressed(copied)
    copied.set(task=f"{copied.victim}/task.py:Tiny", callbacks=[])
    copied.folder.chmod(0o777)
    assert "others can write" in open_run("backup/tiny-0001").untrusted
    assert not open_run("tiny-0001", "backup").untrusted
    assert not open_run("backup/tiny-0001", "backup").untrusted
    for overrides, runs in ([Override("task", "task.py:Tiny", "--task")], "runs"), ([], "backup"):
        with pytest.raises(QuorateError) as raised:  # this task builds no model
            evaluate_run(Asked(Path(runs), "backup/tiny-0001", "last", {}, overrides))
        assert "anybody" not in str(raised.value)


@plain
def test_a_detached_run_is_resumed_by_its_name_from_a_storage_that_others_can_write(copied: Copied) -> None:
    """In the folder of runs there is a link to it, which nobody else has put there."""
    dressed(copied)
    copied.backup.chmod(0o777)
    Path("runs").mkdir()
    Path("runs/tiny-0001").symlink_to(copied.folder)
    for reference, trusts in (("tiny-0001", False), ("runs/tiny-0001", False), ("backup/tiny-0001", True)):
        with pytest.raises(RequestError, match="--detach submits a job to a Ray cluster, and this one says"):
            submit_resume(Path("runs"), reference, {}, [], trust_job=trusts)
    with pytest.raises(RunError, match="may be anybody's"):
        submit_resume(Path("runs"), "backup/tiny-0001", {}, [])


@plain
def test_a_search_that_others_can_write_is_not_resumed_by_its_path(copied: Copied) -> None:
    search = copied.backup / "search-0001"
    (search / "trials").mkdir(parents=True)
    (search / "search.yaml").write_text("")
    search.chmod(0o777)
    with pytest.raises(RunError, match=r"others can write to .*search-0001 may be anybody's.* you trust it, say that"):
        recorded(Path("runs"), "backup/search-0001")
    with pytest.raises(QuorateError) as raised:  # it is none
        recorded(Path("backup"), "search-0001")
    assert "anybody" not in str(raised.value)


@sealed
def test_with_a_key_a_copy_that_looks_like_a_run_has_the_job_of_its_checkpoint(
    copied: Copied, caplog: pytest.LogCaptureFixture
) -> None:
    dressed(copied)
    spec = begun(copied, "", [*copied.given, Override("checkpoint.to", ["checkpoints"], "--set checkpoint.to")])
    assert (spec.callbacks, copied.launched[-1].task) == ([], f"{copied.victim}/task.py:Tiny")
    assert "is not what the key authenticates" in caplog.text and "callbacks" in caplog.text
    copied.assert_unharmed()


@plain
def test_a_run_of_the_user_is_resumed_by_its_path(copied: Copied) -> None:
    shutil.copytree(copied.root / "runs", copied.root / "elsewhere")
    begun(copied, str(copied.root / "elsewhere/tiny-0001"))
    (copied.root / "elsewhere").chmod(0o1777)
    begun(copied, str(copied.root / "elsewhere/tiny-0001"))


@plain
def test_a_task_beside_the_copies_is_not_used_in_their_folder_either(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied.backup / "evil.py").write_bytes(copied.evil)
    copied.set(task=f"{copied.backup}/evil.py:Tiny")
    monkeypatch.chdir(copied.backup)
    with pytest.raises(RunError, match=TASK_NOT_HERE):
        copied.resume("tiny-0001")
    copied.assert_unharmed()


@plain
def test_the_job_in_a_checkpoint_that_was_fetched_is_not_used_later(copied: Copied) -> None:
    shutil.copytree(copied.root / "runs", "runs")
    run = RunFolder(copied.victim / "runs/tiny-0001")
    for entry in run.checkpoints.glob("step-00000004*"):
        shutil.rmtree(entry)
    evil = [f"{copied.outside}/evil.py:Tiny"]
    copied.manifest(lambda present: replace(present, job={**present.job, "callbacks": evil}))
    begun(copied)
    assert len(list(run.checkpoints.glob("step-00000004"))) == 1, "fetched"
    begun(copied, "tiny-0001")
    run.job_file.unlink()
    with pytest.raises(RunError, match=r"is gone, and .* was fetched from .* Put the file back"):
        copied.resume("tiny-0001")
    copied.assert_unharmed()


@sealed
def test_a_run_that_was_fetched_without_a_key_is_not_taken_with_one(copied: Copied, tmp_path: Path) -> None:
    honest = copied.root / "honest"
    shutil.copytree(copied.folder, honest)
    plain = Copied(tmp_path / "plain", copied.server, is_sealed=False)
    for step in ("step-00000002", "step-00000004"):
        shutil.rmtree(copied.folder / step)
        shutil.copytree(plain.folder / step, copied.folder / step)
    copied.set(log_level="debug", checkpoint={"encrypt": None})
    assert begun(copied, "", []).log_level == "debug"
    shutil.rmtree(copied.folder)
    shutil.copytree(honest, copied.folder)
    with pytest.raises(RunError, match=r"without a key.* Remove the run's folder and resume from there again"):
        copied.resume()


@sealed
@pytest.mark.parametrize("place", ["key_file", "key_env"])
def test_each_key_that_a_refusal_advises_is_taken(copied: Copied, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "ab" * 32)
    value = {"key_file": str(copied.key), "key_env": "MY_KEY"}[place]
    key = f"checkpoint.encrypt.{place}"
    begun(copied, "", [Override(key, value, f"--set {key}")])


def put_source(copied: Copied, text: str) -> None:
    page = {"found_at": None, "source": json.loads(TaskSource("task.py", {"task.py": text.encode()}).to_json())}
    (copied.folder / "source.json").write_text(json.dumps(page))


@plain
@pytest.mark.parametrize(
    ("page", "is_sent"),
    [(None, False), (TASK, True), ("his = 1\n", False)],
    ids=["none there", "the same there", "another there"],
)
def test_a_source_that_is_not_there_is_not_sent_there_because_the_job_says_so(
    copied: Copied, page: str | None, is_sent: bool
) -> None:
    copied.set(checkpoint={"source": True})
    if page is not None:
        put_source(copied, page)
    assert begun(copied).checkpoint.source is is_sent
    assert (copied.folder / "source.json").exists() is is_sent, "the copies have begun"


@plain
def test_the_task_that_the_person_names_is_not_sent_because_another_source_is_there(copied: Copied) -> None:
    (copied.victim / "mine.py").write_text(f"{TASK}SECRET = 1\n")
    copied.set(checkpoint={"source": True})
    put_source(copied, TASK)
    named = Override("task", f"{copied.victim}/mine.py:Tiny", "--task")
    assert begun(copied, "", [named]).checkpoint.source is False


@plain
def test_a_source_that_is_trusted_stays_at_its_place(copied: Copied) -> None:
    copied.set(task=f"{copied.outside}/gone.py:Tiny", checkpoint={"source": True})
    put_source(copied, f"{TASK}OTHER = 1\n")
    assert begun(copied, trust_source=True).checkpoint.source is True


@plain
@pytest.mark.parametrize("section", [5, "x", {"to": None}, {"to": "checkpoints"}], ids=str)
def test_a_section_that_is_none_is_replaced_by_what_the_person_says(copied: Copied, section: Any) -> None:
    copied.set()
    job = json.loads(copied.job_file.read_text())
    copied.job_file.write_text(json.dumps({**job, "checkpoint": section}))
    said = Override("checkpoint.to", ["checkpoints"], "--set checkpoint.to")
    assert begun(copied, "", [said]).checkpoint.to == ["checkpoints"]


@plain
@pytest.mark.parametrize("text", ["{}", '{"from": 1, "task": 2}', '{"from": "x", "task": "y"}'])
def test_a_damaged_note_of_where_a_run_is_from_is_told(copied: Copied, text: str) -> None:
    begun(copied)
    Path("runs/tiny-0001/fetched.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"fetched\.json"):
        copied.resume("tiny-0001")


@sealed
def test_a_refusal_says_that_the_key_authenticates_the_job(copied: Copied) -> None:
    words = r"job in checkpoint step-00000004 at .* names is not used unless you say so, although it has your key:\n"
    shutil.rmtree(copied.newest)
    cipher = read_key({"key_file": str(copied.key)})
    source = replace(make_source(copied.root / "others", keys="name: tiny\n"), with_source=False)
    job = load_recorded(copied.root / "runs/tiny-0001/job.yaml", {}, []).spec.model_dump(mode="json")
    saved = save(
        source,
        4,
        folder=CheckpointFolder(source.run.checkpoints, cipher=cipher),
        job={**job, "track": {"wandb": "online"}},
    )
    shutil.copytree(saved.path, copied.newest)
    with pytest.raises(RunError, match=words):
        copied.resume()


def test_a_run_whose_folder_cannot_be_looked_at_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "closed-0001")
    run.path.mkdir()
    monkeypatch.setattr("quorate.storage.run_folder._read_creation", lambda _: (tmp_path / "nothing").stat())
    assert RunRecord.read(run).status is Status.DAMAGED
