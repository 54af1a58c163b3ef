"""Trouble that passes is tried again, slow answers are asked for twice, and nothing is waited for without end."""

import errno
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from command import await_condition
from quorate.data.bad_sample import Unreachable
from quorate.data.threads import interruptible
from quorate.shards import fetching
from quorate.shards.fetching import TRIES, Fetcher, StoreAway
from quorate.storage.objects import ObjectMissing, StoreError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(fetching, "LONGEST_PAUSE", 0.01)


class Store:
    """Raises what it is told to, then answers."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.asked = 0

    def read(self) -> bytes:
        self.asked += 1
        if self.troubles:
            raise self.troubles.pop(0)
        return b"content"


PASSING = [
    OSError(errno.EIO, "i/o"), OSError(errno.ESTALE, "stale"), TimeoutError("slow"), ConnectionResetError("reset"),
    StoreError("away"),
]  # fmt: skip
LASTING = [
    FileNotFoundError(errno.ENOENT, "none"), PermissionError(errno.EACCES, "no"), OSError(errno.EMFILE, "many"),
    StoreError("refused", lasts=True), ObjectMissing("none"), ValueError("odd"),
]  # fmt: skip


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("trouble", PASSING, ids=repr)
def test_passing_trouble_is_tried_again(trouble: Exception, remote: bool) -> None:
    store, fetcher = Store(trouble, trouble), Fetcher(remote)
    assert fetcher.fetch("a.tar", store.read) == b"content"
    assert store.asked == 3
    fetcher.close()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("trouble", LASTING, ids=repr)
def test_lasting_trouble_is_told_at_once(trouble: Exception, remote: bool) -> None:
    store, fetcher = Store(trouble), Fetcher(remote)
    with pytest.raises(Unreachable, match=r"a\.tar cannot be read: "):
        fetcher.fetch("a.tar", store.read)
    assert store.asked == 1
    fetcher.close()


def test_trouble_that_does_not_pass_ends_with_how_often_it_was_tried() -> None:
    store = Store(*[OSError(errno.EIO, "i/o") for _ in range(TRIES)])
    with pytest.raises(Unreachable, match=rf"a\.tar cannot be read \(tried {TRIES} times in .* i/o"):
        Fetcher(False).fetch("a.tar", store.read)
    assert store.asked == TRIES


def test_a_store_is_tried_for_seconds_however_often_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = [StoreError("the store cannot be reached.") for _ in range(50_000)]
    store, fetcher = Store(*trouble[: 2 * TRIES]), Fetcher(True)
    assert fetcher.fetch("a.tar", store.read) == b"content", "it was away for more tries than a file gets"
    monkeypatch.setattr(fetching, "GIVE_UP", 2.0)
    store = Store(*trouble)
    with pytest.raises(StoreAway, match=r"a\.tar cannot be read \(tried \d+ times in .* the store cannot be reached"):
        fetcher.fetch("a.tar", store.read)
    assert store.asked > TRIES
    fetcher.close()


def test_one_object_that_cannot_be_read_does_not_make_the_store_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "GIVE_UP", 0.2)
    fetcher, sound = Fetcher(True), Store()

    def fail() -> bytes:
        fetcher.fetch("b.tar", sound.read)
        raise StoreError("the store cannot do it: InternalError.")

    with pytest.raises(Unreachable, match="InternalError") as raised:
        fetcher.fetch("a.tar", fail)
    assert not isinstance(raised.value, StoreAway)
    fetcher.close()


def test_what_waits_for_long_says_so_once_until_the_store_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetching, "_QUIET", 0.0)
    fetcher = Fetcher(True)
    for _ in range(2):
        caplog.clear()
        fetcher.fetch("a.tar", Store(*[StoreError("away.") for _ in range(5)]).read)
        assert [record.getMessage() for record in caplog.records] == [
            f"a.tar cannot be read: away. It is tried for {fetching.GIVE_UP:.0f} s in all"
        ]
    fetcher.close()


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_explained_already_is_told_as_it_is(remote: bool) -> None:
    fetcher = Fetcher(remote)
    with pytest.raises(Unreachable) as raised:
        fetcher.fetch("a.h5", Store(Unreachable("a.h5 cannot be read here: a filter is missing.")).read)
    assert raised.value.message == "a.h5 cannot be read here: a filter is missing."
    fetcher.close()


def test_closing_ends_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FIRST_PAUSE", 100)
    monkeypatch.setattr(fetching, "LONGEST_PAUSE", 100)
    fetcher = Fetcher(False)
    threading.Timer(0.05, fetcher.close).start()
    began = time.monotonic()
    with pytest.raises(Unreachable, match="reading has ended"):
        fetcher.fetch("a.tar", Store(OSError(errno.EIO, "i/o")).read)
    assert time.monotonic() - began < 30


def test_what_begins_after_the_end_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that would ask have ended: it would wait until patience is over."""
    monkeypatch.setattr(fetching, "PATIENCE", 100)
    fetcher, store = Fetcher(True), Store()
    fetcher.fetch("a.tar", store.read)
    fetcher.close()
    with pytest.raises(Unreachable, match="reading has ended"):
        fetcher.fetch("a.tar", store.read)
    assert store.asked == 1


class Uneven:
    """Answers at once, but for the calls that it holds up."""

    def __init__(self) -> None:
        self.calls = 0
        self.held_up: set[int] = set()
        self.let_go = threading.Event()

    def read(self) -> bytes:
        self.calls += 1
        number = self.calls
        if number in self.held_up:
            assert self.let_go.wait(60)
        return f"answer {number}".encode()


@pytest.fixture
def uneven() -> Iterator[Uneven]:
    store = Uneven()
    yield store
    store.let_go.set()


def warmed_up(store: Uneven) -> Fetcher:
    fetcher = Fetcher(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "_SOONEST", 60.0)  # on a busy machine one of them may be slow
        for _ in range(10):
            fetcher.fetch("a.tar", store.read)
    return fetcher


def test_a_slow_answer_is_asked_for_a_second_time_and_the_first_that_comes_counts(uneven: Uneven) -> None:
    fetcher = warmed_up(uneven)
    uneven.held_up.add(11)
    assert fetcher.fetch("a.tar", uneven.read) == b"answer 12"
    assert fetcher.hedges == 1
    fetcher.close()


def test_a_store_that_is_slow_altogether_is_not_asked_twice_for_everything(uneven: Uneven) -> None:
    fetcher = warmed_up(uneven)
    uneven.held_up.update(range(11, 100, 2))
    for _ in range(3):
        fetcher.fetch("a.tar", uneven.read)
    assert fetcher.hedges == 3
    threading.Timer(0.3, uneven.let_go.set).start()
    fetcher.fetch("a.tar", uneven.read)
    assert fetcher.hedges <= 4
    assert uneven.calls <= 10 + 4 + 4
    fetcher.close()


def test_an_answer_that_never_comes_is_a_timeout_that_is_tried_again(
    uneven: Uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PATIENCE", 1.5)  # long for the one that answers at once
    uneven.held_up.add(1)
    fetcher = Fetcher(True)
    assert fetcher.fetch("a.tar", uneven.read) == b"answer 2"
    assert uneven.calls == 2
    monkeypatch.setattr(fetching, "PATIENCE", 0.05)
    monkeypatch.setattr(fetching, "GIVE_UP", 0.3)
    uneven.held_up.update(range(1, 50))
    with pytest.raises(Unreachable, match="no answer within"):
        fetcher.fetch("a.tar", uneven.read)
    fetcher.close()


def test_closing_ends_the_waiting_for_an_answer(uneven: Uneven) -> None:
    fetcher = Fetcher(True)
    uneven.held_up.add(1)

    def close_when_asked() -> None:
        await_condition("the question", lambda: uneven.calls)
        fetcher.close()

    threading.Thread(target=close_when_asked).start()
    with pytest.raises(Unreachable, match="reading has ended"):
        fetcher.fetch("a.tar", uneven.read)
    assert not uneven.let_go.is_set()
    assert uneven.calls == 1


def test_many_bytes_may_take_longer_than_few(uneven: Uneven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PATIENCE", 0.05)
    monkeypatch.setattr(fetching, "SLOWEST", 1000)
    fetcher = Fetcher(True)
    uneven.held_up.add(1)
    threading.Timer(0.3, uneven.let_go.set).start()
    assert fetcher.fetch("a.tar", uneven.read, 20_000) == b"answer 1"
    assert uneven.calls == 1, "it was not asked again"
    fetcher.close()


class Over(Exception):
    pass


@pytest.mark.parametrize("remote", [False, True])
def test_whoever_waits_hears_that_nobody_wants_it_any_more(
    remote: bool, uneven: Uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an answer does not come, or in the pause between two tries."""
    monkeypatch.setattr(fetching, "FIRST_PAUSE", 100)
    monkeypatch.setattr(fetching, "LONGEST_PAUSE", 100)

    def check() -> None:
        raise Over("the generation is over")

    fetcher = Fetcher(remote)
    uneven.held_up.add(1)
    read = uneven.read if remote else Store(OSError(errno.EIO, "i/o")).read
    with pytest.raises(Over), interruptible(check):
        fetcher.fetch("a.tar", read)
    assert not uneven.let_go.is_set()
    fetcher.close()


def test_requests_are_made_by_threads_that_no_signal_ends_up_in(uneven: Uneven) -> None:
    fetcher = Fetcher(True)
    fetcher.fetch("a.tar", uneven.read)
    thread = next(each for each in threading.enumerate() if each.name == "shard-request")
    with open(f"/proc/self/task/{thread.native_id}/status") as status:  # noqa: PTH123
        blocked = next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    assert blocked >> (signal.SIGTERM - 1) & 1
    fetcher.close()
