import re

import pytest

from command import Workplace

# One for each way in which an exception comes back: from the nursery, from a worker that is being built, from a
# loader's process, and from a step. Every place in user code is in tests/worker.
PLACES = {
    "import": (r"ValueError: trouble in import \(in importing task\.py\)", "<module>"),
    "model": (r"worker \d: ValueError: trouble in model \(in model\(\)\)", "model"),
    "sample": (r"worker \d, lane \d, step \d: ValueError: trouble in sample \(in sample 5 of the", "__getitem__"),
    "loss": (r"worker \d, lane \d, step 5: ValueError: trouble in loss \(in loss\(\)\)", "loss"),
}


@pytest.mark.parametrize("trouble", PLACES)
def test_an_exception_comes_back_once_as_the_users_own_traceback(workplace: Workplace, trouble: str) -> None:
    sentence, function = PLACES[trouble]
    loaders = "2" if trouble == "sample" else "0"
    done = workplace.train("--workers", "2", "--set", f"loader_workers={loaders}", TROUBLE=trouble)
    assert (done.code, done.stdout) == (1, "")
    assert re.match(sentence, done.error)
    assert done.stderr.count("Traceback") == 1
    frame = done.error.partition("Traceback (most recent call last):\n")[2].split("\n")[0]
    assert frame.startswith(f'  File "{workplace.task}", line ')
    assert frame.endswith(f", in {function}")
    told = done.error.split("\n")[0]
    assert workplace.result()["failure"]["message"] == told
    assert [failure["message"] for failure in workplace.failures()] == [told]
    if trouble == "loss":
        steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
        assert steps == [1, 2, 3, 4], "what was trained before is told, whoever was the first to fail"


def test_a_task_that_ends_its_process_is_named(workplace: Workplace) -> None:
    done = workplace.train("--workers", "2", "--json", TROUBLE="os._exit")
    assert done.code == 1
    sentence = r"worker \d \(pid \d+ on host \S+\) exited with code 3 at step 5 while in compute"
    assert re.match(sentence, done.error)
    assert "Traceback" not in done.stderr
    failure = done.document["failure"]
    assert (failure["kind"], failure["step"]) == ("WorkerLost", 5)
    assert workplace.result()["failure"] == failure
    assert [event["message"] for event in workplace.failures()] == [failure["message"]]
