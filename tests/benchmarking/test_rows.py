import pytest

from benchmarks.row import Reading, Row, compared, rows_of


def reading(system: str, *ms: float, case: str = "1 MB", details: dict[str, float] | None = None) -> Reading:
    return Reading(system, case, 2, ms, bytes=2**20, details=details or {})


def row(system: str, ms: float, case: str = "1 MB") -> Row:
    return Row("allreduce", case, system, 2, 1, None, ms, (ms,))


def test_a_row_has_the_median_over_all_rounds_and_the_median_of_each() -> None:
    (found,) = rows_of("allreduce", [reading("gloo", 1.0, 2.0, 9.0), reading("gloo", 3.0, 4.0, 5.0)])
    assert (found.ms, found.rounds_ms) == (3.5, (2.0, 4.0))
    assert found.spread == pytest.approx(1.0 / 3.5)
    assert (found.bench, found.case, found.system, found.processes, found.bytes) == (
        "allreduce",
        "1 MB",
        "gloo",
        2,
        2**20,
    )


def test_one_round_has_no_spread() -> None:
    assert rows_of("allreduce", [reading("gloo", 1.0, 9.0)])[0].spread is None


def test_readings_of_different_cases_or_systems_are_not_mixed() -> None:
    rows = rows_of("x", [reading("a", 1.0), reading("b", 2.0), reading("a", 3.0, case="2 MB"), reading("a", 5.0)])
    assert [(each.system, each.case, each.ms) for each in rows] == [
        ("a", "1 MB", 3.0),
        ("b", "1 MB", 2.0),
        ("a", "2 MB", 3.0),
    ]


def test_details_are_medians_over_the_rounds_that_have_them() -> None:
    readings = [reading("a", 1.0, details={"x_ms": value}) for value in (1.0, 5.0, 2.0)]
    assert rows_of("x", [*readings, reading("a", 1.0)])[0].details == {"x_ms": 2.0}


def test_a_ratio_is_the_time_of_a_peer_divided_by_ours_in_the_same_case() -> None:
    rows = [row("ours", 2.0), row("ours", 10.0, "2 MB"), row("gloo", 6.0), row("gloo", 5.0, "2 MB"), row("mpi", 1.0)]
    found = compared(rows, frozenset({"ours"}), lambda each: each.case)
    assert [(each.case, each.system) for each in found] == [
        ("1 MB", "ours"),
        ("1 MB", "gloo"),
        ("1 MB", "mpi"),
        ("2 MB", "ours"),
        ("2 MB", "gloo"),
    ]
    assert found[0].ratio_to == {"gloo": 3.0, "mpi": 0.5}
    assert found[3].ratio_to == {"gloo": 0.5}
    assert not any(each.ratio_to for each in found if each.system != "ours")


def test_our_own_variants_are_not_peers_of_each_other() -> None:
    found = compared([row("shm", 1.0), row("tcp", 2.0)], frozenset({"shm", "tcp"}), lambda each: each.case)
    assert [each.ratio_to for each in found] == [{}, {}]


def test_a_reading_is_what_a_script_answers() -> None:
    fields = {"case": "cnn", "processes": 2, "ms": [1.0, 2.0], "bytes": None, "threads": 2, "details": {"x": 1.0}}
    assert Reading.of("gloo", fields) == Reading("gloo", "cnn", 2, (1.0, 2.0), None, 2, {"x": 1.0})
    assert Reading.of("gloo", fields | {"system": "mpi"}).system == "mpi", "a script that measures several says which"
