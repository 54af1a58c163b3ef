"""The benchmark of links: how an encrypted one is held against a plain one, and its script over a real cable."""

import json
import sys

import pytest

from benchmarking.wired import needs_cables
from benchmarks.links import Links
from benchmarks.own import links as own_links
from benchmarks.row import Reading, Row, rows_of
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from benchmarks.told import reading


def rows(bench: Links, tls: float, plain: float) -> list[Row]:
    cpu = {"sender_cpu_ms": 30.0, "receiver_cpu_ms": 40.0}
    told = [
        reading(bench.case, 2, [ms] * 3, size=bench.size, details=cpu, system=system)
        for system, ms in (("tls", tls), ("plain", plain))
    ]
    return bench.explained(rows_of("links", [Reading.of("tls", fields) for fields in told]))


@pytest.mark.parametrize(("ms", "verdict"), [(219.0, "met"), (221.0, "missed")])
def test_the_encrypted_link_is_held_against_the_plain_one(ms: float, verdict: str) -> None:
    tls, plain = rows(Links(), ms, 200.0)
    (judgement,) = judge(TARGETS, "links", [tls, plain], 2)
    assert judgement.value == pytest.approx((ms - 200) / 2)
    assert judgement.verdict == verdict
    assert Links().remarks(tls)["slower"] == f"{(ms - 200) / 2:.1f} %"
    assert Links().remarks(plain) == {"sender's CPU": "30 ms", "receiver's CPU": "40 ms"}


def test_another_cable_says_nothing_about_the_target() -> None:
    found = rows(Links(mbit=200.0), 200.0, 200.0)
    assert [each.verdict for each in judge(TARGETS, "links", found, 2)] == ["not measured"]


@needs_cables
def test_a_frame_goes_over_both_links(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (turn,) = Links(size=2**20, mbit=2000.0, repeats=2).turns()
    monkeypatch.setattr(sys, "argv", ["script", json.dumps(turn.order)])
    own_links.main()
    told = json.loads(capfd.readouterr().out)["readings"]
    assert [each["system"] for each in told] == [system.name for system in turn.systems] == ["tls", "plain"]
    for each in told:
        assert (each["case"], each["bytes"], len(each["ms"])) == ("1 MB at 2000 Mbit/s", 2**20, 2)
        assert min(each["ms"]) > 3, "the cable lets no more through"
        assert min(each["details"].values()) > 0
