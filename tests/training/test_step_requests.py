import pytest

from quorate.training.strategy import Save, StepRequest

NOTHING = StepRequest()
SAVE = StepRequest(save=Save.BEGIN)
LEAVE = StepRequest(leave=True)
LAST_SAVE = StepRequest(save=Save.COMMIT, leave=True)


@pytest.mark.parametrize(
    ("requests", "combined"),
    [
        ([NOTHING], NOTHING),
        ([NOTHING, NOTHING], NOTHING),
        ([NOTHING, SAVE], SAVE),
        # The save goes on in the next generation: nobody waits for a disk.
        ([SAVE, LEAVE], StepRequest(save=Save.BEGIN, leave=True)),
        ([LEAVE, NOTHING, LEAVE], LEAVE),
        ([LAST_SAVE, SAVE, LEAVE], LAST_SAVE),  # nobody who stays holds the state
        ([LAST_SAVE, StepRequest("interrupted")], StepRequest("interrupted", Save.COMMIT, True)),
        ([StepRequest("terminated"), SAVE, StepRequest("interrupted")], StepRequest("terminated", Save.BEGIN)),
    ],
)
def test_what_some_are_asked_for_all_do(requests: list[StepRequest], combined: StepRequest) -> None:
    assert StepRequest.combine(requests) == combined
