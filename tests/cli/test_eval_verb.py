import json
import shutil

import pytest

from command import Workplace
from schemas import validate


def test_a_checkpoint_evaluated_again_gives_the_bits_of_the_run_and_leaves_it_as_it_was(
    used_workplace: Workplace,
) -> None:
    before = sorted(str(path) for path in used_workplace.last.rglob("*"))
    done = used_workplace.run("eval", "last", "--workers", "3", "--json")
    assert (done.code, done.stderr) == (0, "[worker 0] a word from the task\n")
    validate("eval", done.document)
    assert done.document["metrics"] == used_workplace.result()["final_metrics"]
    assert done.document["weights_digest"] == used_workplace.result()["weights_digest"]
    assert done.document["step"] == 8
    assert sorted(str(path) for path in used_workplace.last.rglob("*")) == before


@pytest.mark.usefixtures("unmeasured")
def test_an_earlier_checkpoint_is_another_model_and_a_changed_task_is_warned_of(used_workplace: Workplace) -> None:
    used_workplace.task.write_text(used_workplace.task.read_text() + "\nCHANGED = True\n")
    # A parameter that decides how it was trained changes nothing in what was trained.
    done = used_workplace.run("eval", "tiny", "--checkpoint", "6", "--set", "params.learning_rate=0.5")
    assert done.code == 0, done.stderr
    assert "at step 6" in done.stdout
    assert used_workplace.result()["weights_digest"] not in done.stdout
    assert "the task's code has changed since run tiny-0001 began" in done.stderr


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_what_the_task_prints_is_shown_beside_the_answer(used_workplace: Workplace) -> None:
    text = used_workplace.task.read_text()
    head = "    def metrics("
    assert head in text
    begin = text.index(":\n", text.index(head)) + 2
    used_workplace.task.write_text(text[:begin] + '        print("measured")\n' + text[begin:])
    shown = used_workplace.run("eval", "last", "--json")
    assert shown.code == 0, shown.stderr
    assert "[worker 0] measured" in shown.stderr
    validate("eval", shown.document)
    assert "measured" not in used_workplace.run("eval", "last", "--print", "none").stderr


def test_checkpoints_that_were_removed_are_missed_as_by_resume(used_workplace: Workplace) -> None:
    shutil.rmtree(used_workplace.last / "checkpoints")
    done = used_workplace.run("eval", "last")
    assert done.code == 2
    assert done.error.startswith(
        "run tiny-0001 has nothing to evaluate: its events record a checkpoint at step 8, and "
    )
    assert "runs/tiny-0001/checkpoints has none any longer. Put the folder back if you have it" in done.error
    exported = used_workplace.run("checkpoints", "export", "last", "model.pt")
    assert exported.code == 2
    assert "has nothing to load: its events record a checkpoint at step 8" in exported.error


def test_what_cannot_be_evaluated_is_told(used_workplace: Workplace) -> None:
    absent = used_workplace.run("eval", "last", "--checkpoint", "5")
    assert absent.code == 2
    assert absent.error == "run tiny-0001 has no checkpoint of step 5. There are those of steps 4, 6, 8."
    word = used_workplace.run("eval", "last", "--checkpoint", "newest", "--json")
    assert word.code == 2
    assert "'newest' is not a checkpoint: give a step, last or best." in json.loads(word.stdout)["error"]
    source = used_workplace.task.read_text()
    used_workplace.task.write_text(source.replace("return Points(32), Points(6)", "return Points(32)"))
    blind = used_workplace.run("eval", "last")
    assert blind.code == 2
    assert "datasets() gives no validation set" in blind.error


@pytest.mark.usefixtures("unmeasured")
def test_another_meaning_is_refused_with_both_values(used_workplace: Workplace) -> None:
    refused = used_workplace.run("eval", "last", "--set", "lanes=2", QUORATE_SEED="7")
    assert refused.code == 2
    assert "lanes: 4 → 2 (--set lanes); " in refused.error
    assert "seed: 0 → 7 (environment QUORATE_SEED)" in refused.error


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_the_averages_are_evaluated_on_request(workplace: Workplace) -> None:
    workplace.write_job(average={"decay": 0.5})
    assert workplace.train("--json").code == 0
    done = workplace.run("eval", "last", "--averaged", "--json")
    assert done.code == 0, done.stderr
    validate("eval", done.document)
    result = workplace.result()
    assert done.document["averaged"]
    assert done.document["weights_digest"] == result["weights_digest"]
    assert done.document["metrics"].keys() == result["final_metrics"].keys()
    assert done.document["metrics"] != result["final_metrics"]
    exported = workplace.run("checkpoints", "export", "last", "model.pt")
    assert ", trained weights, " in exported.stdout


def test_averages_that_a_run_does_not_keep_are_refused(used_workplace: Workplace) -> None:
    done = used_workplace.run("eval", "last", "--averaged")
    assert done.code == 2
    assert "run tiny-0001 keeps no average of its weights: its job has no `average`" in " ".join(done.stderr.split())
