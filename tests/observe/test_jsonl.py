import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from made_events import fields_of, make_event
from quorate.core import masking
from quorate.core.errors import RunError
from quorate.observe.event import Event
from quorate.observe.events import LogMessage, read_event
from quorate.observe.jsonl import EventTail, JsonlSink


def step(number: int) -> Event:
    return make_event("step", number, {"loss": 0.5}, time=float(number))


def no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def steps_in(path: Path) -> list[int | None]:
    return [event.step for event in EventTail(path).read_new()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


class TestSink:
    def test_appends_one_line_an_event_at_once(self, path: Path) -> None:
        sink = JsonlSink(path)
        sink.handle(step(1))
        assert path.read_text() == step(1).to_json() + "\n"
        sink.close()
        again = JsonlSink(path)
        again.handle(step(2))
        again.close()
        assert [read_event(line) for line in path.read_text().splitlines()] == [step(1), step(2)]

    @pytest.mark.parametrize("torn", [b'{"kind": "st', b'{"kind": "step", "time": 1.0}', b"\x00"])
    def test_a_line_torn_by_a_crash_costs_no_other_event(self, path: Path, torn: bytes) -> None:
        path.write_bytes(step(1).to_json().encode() + b"\n" + torn)
        sink = JsonlSink(path)
        sink.handle(step(2))
        sink.close()
        lines = path.read_bytes().split(b"\n")
        assert lines == [step(1).to_json().encode(), torn, step(2).to_json().encode(), b""]

    def test_a_full_disk_is_told_once_counted_and_tried_again(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        sink = JsonlSink(path)
        sink.handle(step(1))
        real = os.write
        room = [10]

        def almost_full(descriptor: int, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = real(descriptor, data[: room[0]])
            room[0] -= written
            return written

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os, "write", almost_full)
            sink.handle(step(2))
            sink.handle(step(3))
        sink.handle(step(4))
        sink.close()
        assert sink.dropped == 2
        (record,) = caplog.records
        assert "No space left" in record.getMessage()
        assert str(path) in record.getMessage()
        first, missing, last = EventTail(path).read_new()
        assert (first, last) == (step(1), step(4))
        told = "2 events are missing here: events.jsonl could not be written (No space left on device)"
        assert isinstance(missing, LogMessage) and missing.message == told

    def test_trouble_that_comes_again_is_told_again(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        sink = JsonlSink(path)
        for number in (1, 3):
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", no_space)
                sink.handle(step(number))
            sink.handle(step(number + 1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_space)
            sink.handle(step(5))
        sink.close()
        assert len(caplog.records) == sink.dropped == 3
        events = EventTail(path).read_new()
        assert [event.step or event.kind for event in events] == ["log", 2, "log", 4, "log"]
        assert fields_of(events[-1])["message"].startswith("an event is missing here: ")

    def test_a_folder_that_comes_later_is_found(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        sink = JsonlSink(tmp_path / "later" / "events.jsonl")
        sink.handle(step(1))
        (tmp_path / "later").mkdir()
        sink.handle(step(2))
        sink.close()
        assert sink.dropped == 1
        assert steps_in(sink.path) == [None, 2]

    def test_after_closing_events_are_dropped(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        sink = JsonlSink(path)
        sink.close()
        sink.close()
        sink.handle(step(1))
        assert sink.dropped == 1
        assert not path.exists()

    def test_threads_do_not_mix_their_lines(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
        sink = JsonlSink(path)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: sink.handle(step(number)), range(100)))
        sink.close()
        assert sorted(number for number in steps_in(path) if number is not None) == list(range(100))


class TestTail:
    def test_something_else_in_the_place_of_the_file_is_told(self, path: Path) -> None:
        path.mkdir()
        with pytest.raises(RunError, match=r"cannot read .*: Is a directory\. Move it out of the way\."):
            EventTail(path).read_new()

    def test_reads_only_what_is_new_and_whole(self, path: Path) -> None:
        tail = EventTail(path)
        assert tail.read_new() == []
        line = step(2).to_json() + "\n"
        with path.open("a") as file:

            def append(text: str) -> None:
                file.write(text)
                file.flush()

            append(step(1).to_json() + "\n" + line[:9])
            assert tail.read_new() == [step(1)]
            assert tail.read_new() == []
            append(line[9:])
            assert tail.read_new() == [step(2)]

    @pytest.mark.parametrize("line", [b"", b"{", b"[]", b"1", b"{}", b'{"kind": "x"}', b"\xff\xfe", b"null"])
    def test_what_is_no_event_is_skipped(self, path: Path, line: bytes) -> None:
        path.write_bytes(line + b"\n" + step(1).to_json().encode() + b"\n")
        assert EventTail(path).read_new() == [step(1)]

    def test_a_file_that_was_replaced_by_a_shorter_one_is_read_from_its_start(self, path: Path) -> None:
        tail = EventTail(path)
        path.write_text("".join(step(number).to_json() + "\n" for number in range(5)))
        assert len(tail.read_new()) == 5
        path.write_text(step(9).to_json() + "\n")
        assert tail.read_new() == [step(9)]

    def test_fields_come_back(self, path: Path) -> None:
        fields: dict[str, Any] = {"metrics": {"accuracy": 0.5, "text": "a\nb\u2028é"}, "best": True}
        event = make_event("evaluation", 3, fields, time=1.5)
        sink = JsonlSink(path)
        sink.handle(event)
        sink.close()
        assert EventTail(path).read_new() == [event]


def test_a_masked_event_is_written_as_every_other(tmp_path: Path) -> None:
    secrets, masking.SECRETS = masking.SECRETS, masking.Secrets(["hunter2-hunter2", "694200", "checkpoint"])
    try:
        sink = JsonlSink(tmp_path / "events.jsonl")
        sink.append('{"kind":"log","version":1,"time":1694200.5,"message":"it is hunter2-hunter2"}')
        sink.append('{"kind":"checkpoint","version":1,"time":1694200.5,"step":3}')
        sink.close()
    finally:
        masking.SECRETS = secrets
    assert (tmp_path / "events.jsonl").read_text().splitlines() == [
        '{"kind":"log","version":1,"time":1694200.5,"message":"it is ***"}',
        '{"kind":"checkpoint","version":1,"time":1694200.5,"step":3}',
    ]
