import pytest

from quorate.training.strategy import BEGIN_AND_BREAK, BREAK, SAVE, SAVE_AND_BREAK, strongest_wish


@pytest.mark.parametrize(
    ("wishes", "what_all_do"),
    [
        ([None, None], None),
        ([None, SAVE], SAVE),
        ([SAVE, BREAK], BEGIN_AND_BREAK),  # the save goes on in the next generation: nobody waits for a disk
        ([BREAK, BEGIN_AND_BREAK], BEGIN_AND_BREAK),
        ([BREAK, None, BREAK], BREAK),
        ([SAVE_AND_BREAK, SAVE, BREAK], SAVE_AND_BREAK),  # nobody who stays holds the state
        ([SAVE_AND_BREAK, "interrupted"], "interrupted"),
        (["terminated", SAVE, "interrupted"], "terminated"),
    ],
)
def test_what_some_are_asked_for_all_do(wishes: list[str | None], what_all_do: str | None) -> None:
    assert strongest_wish(wishes) == what_all_do
