from pathlib import Path

import pytest

from quorate.api.chaos import FaultRequest
from quorate.chaos.script import Act, Fault
from quorate.core.errors import RequestError
from quorate.spec.job import JobSpec

SPEC = JobSpec(task="task.py:Task", batch_size=8, steps=24, lanes=4, workers=2)


def test_faults_of_the_command_line_come_before_those_of_a_file(tmp_path: Path) -> None:
    script = tmp_path / "faults.txt"
    script.write_text("# written\nkill all at step 4  # all of them\n")
    request = FaultRequest.of(["kill worker 1 at step 20"], script, random=False, mtbf=None, seed=None)
    assert request.script(SPEC, steps=None) == (Fault(Act.KILL, 1, 20), Fault(Act.KILL, None, 4))


def test_random_faults_need_the_number_of_steps() -> None:
    request = FaultRequest.of(None, None, random=True, mtbf="10 steps", seed=7)
    assert request.script(SPEC, steps=None) == ()
    assert request.script(SPEC, steps=200) == FaultRequest((), 10.0, 7).script(SPEC, 200) != ()


@pytest.mark.parametrize(
    ("texts", "script", "random", "mtbf", "seed", "why"),
    [
        (None, None, False, None, None, 'no fault is given: write --fault "kill worker 1 at step 20", --script FILE'),
        (["kil all at step 1"], None, False, None, None, "--fault: `kil all at step 1` is not understood"),
        (
            None,
            "nowhere.txt",
            False,
            None,
            None,
            "cannot read the fault script nowhere.txt: No such file or directory.",
        ),
        (None, None, True, None, None, "--random needs to know how often: add --mtbf"),
        (["kill all at step 1"], None, True, "5s", None, "--random makes the faults itself"),
        (None, None, True, "often", None, "`often` is not a time"),
        (None, None, True, "9999999 steps", 3, "with --seed 3 it ends before the first fault. Give a smaller --mtbf"),
        (["kill all at step 1"], None, False, "5s", None, "--mtbf is for --random, which is not given"),
        (["kill all at step 1"], None, False, None, 3, "The seed of the job is set with --set seed=3"),
        (["kill all at step 25"], None, False, None, None, "there is no step 25; the job has 24 steps"),
    ],
)
def test_a_wrong_request_is_refused_with_the_remedy(
    texts: list[str] | None, script: str | None, random: bool, mtbf: str | None, seed: int | None, why: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        FaultRequest.of(texts, None if script is None else Path(script), random, mtbf, seed).script(SPEC, steps=24)
    assert why in refusal.value.message


def test_a_script_that_is_no_text_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "faults.bin"
    script.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="is not text in UTF-8"):
        FaultRequest.of(None, script, random=False, mtbf=None, seed=None)
