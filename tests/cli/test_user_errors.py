import re

import pytest

from command import Workplace

PLACES = {
    "import": (r"ValueError: trouble in import \(in importing task\.py\)", "<module>"),
    "model": (r"worker \d: ValueError: trouble in model \(in model\(\)\)", "model"),
    "datasets": (r"worker \d: ValueError: trouble in datasets \(in datasets\(\)\)", "datasets"),
    "sample": (r"worker \d, lane \d, step \d: ValueError: trouble in sample \(in sample 5 of the", "__getitem__"),
    "collate": (r"worker \d, lane \d, step 1: ValueError: trouble in collate \(in collate\(\)\)", "collate"),
    "loss": (r"worker \d, lane \d, step 5: ValueError: trouble in loss \(in loss\(\)\)", "loss"),
    "backward": (r"worker \d, lane \d, step 5: ValueError: trouble in backward \(in backward\(\)\)", "<lambda>"),
    "optimizer step": (r"worker \d, step 1: ValueError: trouble in optimizer step \(in optimizer", "step"),
    "metrics": (r"worker \d, step 4: ValueError: trouble in metrics \(in metrics\(\)\)", "metrics"),
    "sys.exit": (r"worker \d, lane \d, step 5: SystemExit: the task has had enough \(in loss\(\)\)", "loss"),
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


@pytest.mark.parametrize(
    ("trouble", "what"),
    [("os._exit", "exited with code 3 at step 5 while in compute"), ("segfault", "was killed by SIGSEGV at step 5")],
)
def test_a_task_that_ends_its_process_is_named(workplace: Workplace, trouble: str, what: str) -> None:
    done = workplace.train("--workers", "2", "--json", TROUBLE=trouble)
    assert done.code == 1
    assert re.match(rf"worker \d \(pid \d+ on host \S+\) {re.escape(what)}", done.error)
    assert "Traceback" not in done.stderr
    failure = done.document["failure"]
    assert (failure["kind"], failure["step"]) == ("WorkerLost", 5)
    assert workplace.result()["failure"] == failure
    assert [event["message"] for event in workplace.failures()] == [failure["message"]]
