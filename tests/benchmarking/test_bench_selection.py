import pytest

from benchmarks.allreduce import check_processes
from benchmarks.scaling import Scaling
from benchmarks.selection import Crowd, choose_systems, parse_counts, parse_crowds, parse_names, parse_sizes
from benchmarks.size import size_in_words
from benchmarks.step import SYSTEMS
from quorate.core.errors import RequestError


def test_sizes_count_in_powers_of_1024() -> None:
    assert parse_sizes("4B, 1KB,64kb,25MiB,1 GB") == [4, 1024, 65536, 25 * 2**20, 2**30]


@pytest.mark.parametrize(("size", "words"), [(4, "4 B"), (1024, "1 KB"), (1536, "1536 B"), (25 * 2**20, "25 MB")])
def test_sizes_are_told_as_they_are_typed(size: int, words: str) -> None:
    assert size_in_words(size) == words
    assert parse_sizes(words) == [size]


@pytest.mark.parametrize("text", ["1XB", "MB", "1.5MB", "-1KB", "1024"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"is not a size.*25MB"):
        parse_sizes(f"1KB,{text}")


@pytest.mark.parametrize("text", ["0KB", "6B"])
def test_a_size_is_of_whole_values(text: str) -> None:
    with pytest.raises(RequestError, match="multiple of 4 bytes above 0"):
        parse_sizes(text)


def test_a_value_that_is_given_twice_is_measured_once() -> None:
    assert parse_counts("4,2,4", "--processes") == [4, 2]


@pytest.mark.parametrize("text", ["two", "0", "-2", "2.5"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"--processes: '.*' is not a whole number above 0"):
        parse_counts(text, "--processes")


@pytest.mark.parametrize("text", ["", " ,", ","])
def test_an_empty_list_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--processes: nothing is given"):
        parse_counts(text, "--processes")


def test_a_crowd_may_have_threads() -> None:
    assert parse_crowds("2,4x2", "--workers") == [Crowd(2, 1), Crowd(4, 2)]


@pytest.mark.parametrize("text", ["4x", "x2", "4x0", "0x4", "0", "4x2x2", "four"])
def test_what_is_no_crowd_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match="4x2 for 4 processes of 2 threads each"):
        parse_crowds(text, "--workers")


def test_names_are_taken_in_the_usual_order() -> None:
    assert parse_names("gloo,quorate-shm", ["quorate-shm", "quorate-tcp", "gloo"], "--systems") == [
        "quorate-shm",
        "gloo",
    ]


def test_a_misspelt_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"'glo' is not one of gloo, openmpi\. Did you mean gloo\?"):
        parse_names("glo", ["gloo", "openmpi"], "--systems")


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
