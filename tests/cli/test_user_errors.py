import pytest

from command import Workplace


@pytest.mark.usefixtures("unmeasured")
def test_an_exception_in_one_of_two_workers_comes_back_once_as_the_users_own_traceback(workplace: Workplace) -> None:
    saved = "runs/tiny-0001/checkpoints/step-00000004*"
    done = workplace.train("--workers", "2", TROUBLE="loss", AWAITED=saved)
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
    assert done.advice == "quorate resume tiny-0001 --branch  (once it is fixed: resumes from step 4 in a new run)"
    assert done.stderr.endswith("\nlogs: runs/tiny-0001/logs\n")


@pytest.mark.usefixtures("unmeasured")
def test_an_error_of_quorates_that_the_task_raises_late_fails_the_resumed_job_and_loses_nothing(
    used_workplace: Workplace,
) -> None:
    arguments = ("resume", "last", "--steps", "16", "--workers", "1", "--json")
    saved = "runs/tiny-0001/checkpoints/step-00000010*"
    done = used_workplace.run(*arguments, TROUBLE="late refusal", AWAITED=saved)
    assert (done.code, done.document["status"]) == (1, "failed")
    assert done.error.endswith("step 11: TaskError: the task has changed its mind (in loss())")
    assert used_workplace.result()["failure"] == done.document["failure"]
    assert "steps: 16  # --steps" in (used_workplace.last / "job.yaml").read_text()
    assert used_workplace.checkpoints()[-1].startswith("step-00000010")
