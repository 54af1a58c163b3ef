"""What is made once per object: that of one object is not held up by another's."""

import threading

from quorate.core.cached import cached_property


class Slow:
    def __init__(self, goes_on: threading.Event) -> None:
        self.is_making = threading.Event()
        self.goes_on = goes_on
        self.made = 0

    @cached_property
    def value(self) -> int:
        self.is_making.set()
        assert self.goes_on.wait(30)
        self.made += 1
        return self.made


def test_it_is_made_once() -> None:
    goes_on = threading.Event()
    goes_on.set()
    slow = Slow(goes_on)
    assert slow.value == slow.value == slow.made == 1


def test_no_object_waits_for_what_is_being_made_of_another() -> None:
    goes_on = threading.Event()
    one, other = Slow(goes_on), Slow(threading.Event())
    other.goes_on.set()
    making = threading.Thread(target=lambda: one.value)
    making.start()
    try:
        assert one.is_making.wait(30)
        assert other.value == 1
    finally:
        goes_on.set()
        making.join()
    assert one.value == 1
