import re

from command import Workplace


def test_a_task_that_starts_a_thread_is_spawned_to_the_same_bits(workplace: Workplace, undisturbed: str) -> None:
    spawned = workplace.train("--workers", "2", "--json", TROUBLE="thread")
    assert spawned.code == 0, spawned.stderr
    assert spawned.document["weights_digest"] == undisturbed
    log = workplace.log("nursery")
    for worker in range(2):
        pattern = rf"worker {worker} is process \d+, spawned: importing the task started a thread, which a fork would"
        assert re.search(pattern, log)
        assert "a word from the task" in workplace.log(f"worker-{worker}")
