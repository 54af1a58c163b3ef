from collections.abc import Callable

import pytest

from benchmarks.allreduce import check_processes
from benchmarks.scaling import Scaling
from benchmarks.selection import Crowd, choose_systems, parse_counts, parse_crowds, parse_names, parse_sizes
from benchmarks.size import size_in_words
from benchmarks.step import SYSTEMS
from quorate.core.errors import RequestError


@pytest.mark.parametrize(("size", "words"), [(4, "4 B"), (1024, "1 KB"), (1536, "1536 B"), (25 * 2**20, "25 MB")])
def test_sizes_are_told_as_they_are_typed(size: int, words: str) -> None:
    assert size_in_words(size) == words
    assert parse_sizes(words) == [size]


def test_all_systems_are_measured_unless_some_are_named() -> None:
    assert choose_systems(None, SYSTEMS) == list(SYSTEMS)
    assert [system.name for system in choose_systems("fabric,quorate", SYSTEMS)] == ["quorate", "fabric"]


def test_one_process_has_nobody_to_exchange_with() -> None:
    assert check_processes([2, 4]) == [2, 4]
    with pytest.raises(RequestError, match="1 process has nobody to exchange with"):
        check_processes([1, 2])


def test_more_workers_than_lanes_are_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="16 workers cannot host 8 lanes"):
        Scaling([Crowd(2), Crowd(16)], lanes=8)


def names(text: str) -> list[str]:
    return parse_names(text, ["shm", "tcp", "gloo"], "--systems")


def counts(text: str) -> list[int]:
    return parse_counts(text, "--processes")


def crowds(text: str) -> list[Crowd]:
    return parse_crowds(text, "--workers")


def test_lists_are_read_in_the_usual_order_each_value_once() -> None:
    assert parse_sizes("4B, 1KB,64kb,25MiB,1 GB") == [4, 1024, 65536, 25 * 2**20, 2**30], "powers of 1024"
    assert counts("4,2,4") == [4, 2]
    assert crowds("2,4x2") == [Crowd(2, 1), Crowd(4, 2)]
    assert names("gloo,shm") == ["shm", "gloo"]


@pytest.mark.parametrize(
    ("parse", "texts", "words"),
    [
        (parse_sizes, ["1KB,1XB", "MB", "1.5MB", "-1KB", "1024"], r"is not a size.*25MB"),
        (parse_sizes, ["0KB", "6B"], "multiple of 4 bytes above 0"),
        (counts, ["two", "0", "-2", "2.5"], r"--processes: '.*' is not a whole number above 0"),
        (counts, ["", " ,", ","], "--processes: nothing is given"),
        (crowds, ["4x", "x2", "4x0", "0x4", "0", "4x2x2", "four"], "4x2 for 4 processes of 2 threads each"),
        (names, ["glo"], r"'glo' is not one of shm, tcp, gloo\. Did you mean gloo\?"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_an_example(
    parse: Callable[[str], object], texts: list[str], words: str
) -> None:
    for text in texts:
        with pytest.raises(RequestError, match=words):
            parse(text)
