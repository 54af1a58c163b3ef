from command import Workplace


def test_an_exception_in_one_of_two_workers_comes_back_once_as_the_users_own_traceback(workplace: Workplace) -> None:
    done = workplace.train("--workers", "2", TROUBLE="loss")
    assert (done.code, done.stdout) == (1, "")
    worker, lane, rest = done.error.split(", ")
    assert (worker[:-1], lane[:-1]) == ("worker ", "lane ")
    assert rest == "step 5: ValueError: trouble in loss (in loss())"
    first, *frames = done.traceback.split("\n")
    assert first == "Traceback (most recent call last):"
    assert frames[0].startswith(f'  File "{workplace.task}", line ')
    assert frames[0].endswith(", in loss")
    assert workplace.result()["failure"]["message"] == done.error
    assert [failure["message"] for failure in workplace.failures()] == [done.error]
    steps = [event["step"] for event in workplace.events() if event["kind"] == "step"]
    assert steps == [1, 2, 3, 4], "what was trained before is told, whoever was the first to fail"
    assert done.advice == "quorate resume tiny-0001 --branch  (once it is mended: goes on from step 4 in a new run)"
    assert done.stderr.endswith("\nlogs: runs/tiny-0001/logs\n")
