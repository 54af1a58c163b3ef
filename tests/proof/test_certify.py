"""A certificate says that segments of a run came to the same bits again: what was changed in the run is found."""

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proof.proven_runs import checkpoints, copied, edit_loss, trained, trainer
from quorate.api.warm import WarmRunner
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import encode
from quorate.core.digests import weights_digest
from quorate.core.errors import QuorateError, RequestError
from quorate.proof.again import Again
from quorate.proof.certificate import (
    UNENDED,
    certify,
    drawn,
    ends_of,
    evidence,
    faults_of,
    make_key,
    problems_of,
    public_key,
    read_key,
)
from quorate.replica.device import digests
from quorate.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("unmeasured")

DATA_TASK = """
import torch
from pathlib import Path
from torch.utils.data import TensorDataset
from same_bits_tasks import Normed, points

class Filed(Normed):
    def datasets(self):
        file = Path(__file__).with_name("data.pt")
        if not file.exists():
            torch.save(points(1, 156).tensors, file)
        return TensorDataset(*torch.load(file)), points(2, 40)
"""


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "key.pem"
    make_key(file)
    return file


@pytest.fixture(scope="session")
def certified(runner: WarmRunner, run: RunFolder, key: Path) -> Any:
    return certify(trainer(runner, run), key, 2)


def written(certified: Any, folder: Path, **changed: Any) -> Path:
    file = folder / "certificate.json"
    file.write_text(json.dumps({**certified[0], **changed}))
    return file


def test_a_run_that_was_interrupted_before_an_evaluation_is_covered_until_the_checkpoint_before(
    runner: WarmRunner, run: RunFolder
) -> None:
    other = copied(run, "interrupted")
    info = checkpoints(other)[20]
    remove_evaluation(other, 20)
    manifest = replace(info.manifest, phase=0)
    (info.path / "manifest.json").write_bytes(manifest.to_json().encode())
    info.path.rename(info.path.with_name("step-00000020"))
    there = trainer(runner, other)
    ends = ends_of(there)
    assert ends.left_out == {"step-00000020": UNENDED}
    about = evidence(there, ends)
    assert (about["covered"], about["recorded_to"]) == (16, 20)
    assert "was done at step 20, and its last checkpoint is of step 16" in faults_of(about, ends, is_all=True)[0]
    other.result_file.unlink()
    assert faults_of(evidence(there, ends), ends, is_all=True) == []


def test_an_honest_run_is_certified_on_other_numbers_of_workers(
    runner: WarmRunner, run: RunFolder, certified: Any, tmp_path: Path
) -> None:
    assert [each.difference for each in certified[1]] == [None, None]
    assert all(each["workers"] != 2 for each in certified[0]["segments"])
    file = written(certified, tmp_path)
    assert problems_of(file) == (certified[0], [])
    assert problems_of(file, trainer(runner, run)) == (certified[0], [])


def test_a_document_that_was_changed_is_found(certified: Any, tmp_path: Path) -> None:
    document = certified[0]
    for changed in ({"segments": document["segments"][::-1]}, {"run": {**document["run"], "name": "x"}}):
        _, problems = problems_of(written(certified, tmp_path, **changed))
        assert "the signature is wrong" in problems[0]
        assert "not those that are drawn" in problems[1]


def test_a_certificate_is_of_the_key_that_is_asked_for(certified: Any, tmp_path: Path) -> None:
    file, public = written(certified, tmp_path), certified[0]["public_key"]
    (tmp_path / "lab.pub").write_text(f"{public}\n")
    assert public_key(str(tmp_path / "lab.pub")) == public_key(public.upper()) == public
    assert problems_of(file, signer=public)[1] == []
    assert "was signed with the key" in problems_of(file, signer=public_key("0" * 64))[1][0]
    with pytest.raises(RequestError, match="64 hexadecimal digits"):
        public_key(str(file))


def of_run(**changed: Any) -> Callable[[Any], Any]:
    return lambda document: {**document, "run": {**document["run"], **changed}}


def of_first_segment(**changed: Any) -> Callable[[Any], Any]:
    return lambda document: {
        **document,
        "segments": [{**document["segments"][0], **changed}, *document["segments"][1:]],
    }


UNREADABLE: dict[str, Callable[[Any], Any]] = {
    "a list": lambda _: [],
    "no segments": lambda document: {**document, "segments": []},
    "no states": of_run(states={}),
    "a control character in the name": of_run(name="x\x1b[2J"),
    "a control character in a name that is left out": of_run(left_out={"step-1\x1b[2J": "is damaged"}),
    "a step that is a word": of_first_segment(from_step="x"),
    "fewer than no steps": of_first_segment(compared=-1),
    "a state that is a word": of_first_segment(recorded="nonsense"),
    "a key with spaces": lambda document: {**document, "public_key": " " + document["public_key"][1:]},
    "more than a certificate": lambda document: {**document, "more": 1},
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_senseless_certificate_is_refused(what: str, certified: Any, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(UNREADABLE[what](certified[0])))
    with pytest.raises(RequestError, match="is no certificate that can be read") as refused:
        problems_of(file)
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"run": 1, "run": 2}'])
def test_what_is_no_document_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(RequestError, match="is no certificate that can be read"):
        problems_of(tmp_path / "other")


def test_segments_are_what_lies_between_states(certified: Any, key: Path, tmp_path: Path) -> None:
    first = certified[0]["segments"][0]
    for changed in ({"from_step": first["step"]}, {"recorded": "0" * 64}, {"step": first["step"] + 1}):
        assert "are not those that are drawn" in signed_again(of_first_segment(**changed)(certified[0]), key, tmp_path)
    counted = of_first_segment(compared=first["compared"] + 1)(certified[0])
    assert "counts other steps" in signed_again(counted, key, tmp_path)
    assert signed_again(certified[0], key, tmp_path) == ""


def signed_again(document: Any, key: Path, folder: Path) -> str:
    """The problems of a document that somebody has changed and signed."""
    rest = {name: value for name, value in document.items() if name != "signature"}
    signature = read_key(key).sign(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hex()
    (folder / "signed.json").write_text(json.dumps({**rest, "signature": signature}))
    return "; ".join(problems_of(folder / "signed.json")[1])


def test_a_run_that_was_changed_later_is_not_the_one_that_was_certified(
    runner: WarmRunner, run: RunFolder, certified: Any, tmp_path: Path
) -> None:
    other = copied(run, "changed-later")
    edit_loss(other, 6)
    change_weight(other, 8)
    _, problems = problems_of(written(certified, tmp_path), trainer(runner, other))
    assert [each.split(" of run")[0] for each in problems] == ["the events", "the states"]


def test_a_key_is_its_owners_alone(key: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(RequestError, match="File exists"):
        make_key(key)
    copy = tmp_path / "key.pem"
    copy.write_bytes(key.read_bytes())
    copy.chmod(0o644)
    with pytest.raises(RequestError, match="others can read the key"):
        certify(None, copy, 1)  # type: ignore[arg-type] # it is looked at first


def change_weight(run: RunFolder, step: int) -> None:
    """Change one weight of a checkpoint, and make all digests of it fit."""
    folder, info = CheckpointFolder.at(run.checkpoints), checkpoints(run)[step]
    loaded = folder.load(info)
    state = loaded.state
    weight = next(iter(state["replica"]["tensors"].values()))
    weight.view(-1)[0] += 1e-6
    encoded = encode(state)
    attempt = folder.open(info.cursor)
    attempt.write(0, 1, TensorFile(encoded.tensors).chunks())
    folder.remove(info.path)
    told = weights_digest(digests(state["replica"]["tensors"].items()))
    folder.commit(attempt.name, replace(info.manifest, skeleton=encoded.skeleton, weights_digest=told), lambda: None)
    folder.verify(checkpoints(run)[step])


def change_seed(run: RunFolder) -> None:
    text = run.job_file.read_text()
    assert "seed: 7" in text
    run.job_file.write_text(text.replace("seed: 7", "seed: 8"))


def change_events(run: RunFolder, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Have other events in the place of each."""
    events = [changed for line in run.events_file.read_text().splitlines() for changed in change(json.loads(line))]
    run.events_file.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in events))


def remove_evaluation(run: RunFolder, step: int) -> None:
    change_events(run, lambda event: [] if (event["kind"], event.get("step")) == ("evaluation", step) else [event])


def invent_evaluation(run: RunFolder) -> None:
    def change(event: dict[str, Any]) -> list[dict[str, Any]]:
        if (event["kind"], event.get("step")) != ("step", 6):
            return [event]
        return [event, {**event, "kind": "evaluation", "metrics": {"loss": 0.001}}]

    change_events(run, change)


def damage(run: RunFolder, step: int) -> None:
    for part in checkpoints(run)[step].path.glob("*.safetensors"):
        part.write_bytes(b"damaged")


def change_notes(file: Path, change: Callable[[Any], None]) -> None:
    notes = json.loads(file.read_text())
    change(notes)
    file.write_text(json.dumps(notes))


def forge_the_last(run: RunFolder) -> None:
    change_weight(run, 20)
    remove_evaluation(run, 20)


MANIPULATED: dict[str, tuple[Callable[[RunFolder], Any], str]] = {
    "one weight of a checkpoint": (lambda run: change_weight(run, 8), "step 8: state"),
    "the loss of one event": (lambda run: edit_loss(run, 6), "step 6: loss"),
    "the seed of the job": (change_seed, "step 1: loss"),
    "the last checkpoint and its evaluation": (
        forge_the_last,
        "the weights_digest of result.json",
    ),
    "no evaluation in between": (lambda run: remove_evaluation(run, 5), "step 5: metric loss"),
    "no last evaluation": (lambda run: remove_evaluation(run, 20), "step 20: metric loss"),
    "an invented evaluation": (invent_evaluation, "step 6: evaluation"),
    "a damaged checkpoint": (lambda run: damage(run, 12), "step-00000012 is damaged"),
    "the identity of the data": (
        lambda run: change_notes(run.path / "identity.json", lambda known: known["facts"]["data"].update(digest="0")),
        "step 0: data",
    ),
    "no identity": (lambda run: (run.path / "identity.json").unlink(), "has no identity"),
    "the metrics of the result": (
        lambda run: change_notes(run.result_file, lambda told: told["final_metrics"].update(loss=0.0)),
        "the final_metrics of result.json",
    ),
}


@pytest.mark.parametrize("what", MANIPULATED)
def test_what_was_changed_is_found_by_all_segments(what: str, runner: WarmRunner, run: RunFolder, key: Path) -> None:
    other = copied(run, what.replace(" ", "-"), {4, 8, 12, 20})
    change, expected = MANIPULATED[what]
    change(other)
    try:
        _, found = certify(trainer(runner, other), key, None)
    except QuorateError as refused:
        assert expected in refused.message
        return
    difference = found[-1].difference
    assert difference is not None
    assert expected.startswith(f"step {difference.step}:")
    assert expected.partition(": ")[2] in difference.values


def test_other_data_with_the_same_first_and_last_sample_are_found(
    runner: WarmRunner, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (tmp_path / "filed.py").write_text(DATA_TASK)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    filed = trained(runner, tmp_path, f"{tmp_path / 'filed.py'}:Filed", steps=8)
    inputs, classes = torch.load(tmp_path / "data.pt")
    inputs[70] += 1e-4
    torch.save((inputs, classes), tmp_path / "data.pt")
    try:
        assert differing(certify(trainer(runner, filed), key, None)[1])
    except QuorateError as refused:
        assert "the data have changed" in refused.message


def differing(found: list[Again]) -> list[int]:
    return [each.step for each in found if each.difference is not None]


def test_a_change_in_one_of_twenty_segments_is_found_by_three_in_three_of_twenty_cases() -> None:
    trials = [drawn({"states": dict.fromkeys(range(20)), "trial": trial}, "", 3) for trial in range(100)]
    counts = [sum(place in places for places in trials) for place in range(20)]
    assert sum(counts) == 300, "each trial draws three"
    assert all(3 <= count <= 27 for count in counts), "15 of 100, give or take"


def test_three_of_twenty_real_segments_find_what_was_changed_in_one_of_them_and_not_elsewhere(
    runner: WarmRunner, key: Path, tmp_path: Path
) -> None:
    many = trained(runner, tmp_path, checkpoint={"every": 1, "keep": 30})
    edit_loss(many, 14)
    there = trainer(runner, many)
    about = evidence(there, ends_of(there))
    assert len(about["states"]) == 20
    places = {word: drawn(about, word, 3) for word in map(str, range(100))}
    hit = next(word for word, chosen in places.items() if 13 in chosen)
    missed = next(word for word, chosen in places.items() if 13 not in chosen)
    assert differing(certify(there, key, 3, hit)[1]) == [14]
    assert differing(certify(there, key, 3, missed)[1]) == []
