"""What is said of a cluster, by readings of its nodes; and what a probe reads, on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quorate.core.errors import JobFileError
from quorate.core.installation import install_of
from quorate.doctor import checkup
from quorate.doctor.checkup import checks_of_engine, examine
from quorate.doctor.cluster import PIECE, ClusterReading, NodeProbe, NodeReading, WayReading, judge
from quorate.doctor.report import Finding, Level
from quorate.engines.ray.shared_storage import Reach

HERE = {"python": "3.12.1", "ray": "2.60.0", "torch": "2.13.0", "quorate": "0.1.0"}
ONE, TWO = (
    NodeReading(name, versions=HERE, resources={"CPU": 8.0, "GPU": 1.0}, clock_offset_s=0.002, round_trip_s=0.001)
    for name in ("one", "two")
)
WAYS = (WayReading("one", "two", 1e9), WayReading("two", "one", 1.1e9))
WELL = ClusterReading((ONE, TWO), WAYS, "/mnt/shared")


def levels(found: list[Finding]) -> set[Level]:
    return {finding.level for finding in found}


def only_trouble(cluster: ClusterReading, here: dict[str, str] = HERE) -> Finding:
    (finding,) = [found for found in judge(cluster, here) if found.level is not Level.OK]
    assert finding.remedy
    return finding


def test_a_cluster_that_is_well() -> None:
    found = judge(WELL, HERE)
    assert levels(found) == {Level.OK}
    texts = {finding.name: finding.text for finding in found}
    assert texts["nodes"] == "2 nodes with 16 CPUs, 2 GPUs: one, two"
    assert texts["torch on nodes"] == "2.13.0, as here"
    assert texts["ways between nodes"].endswith("the slowest way has 1,000 MB/s, from one to two")
    assert texts["storage of nodes"] == "/mnt/shared is read and written by 2 nodes"
    assert "storage of nodes" not in {finding.name for finding in judge(replace(WELL, storage=None), HERE)}


@pytest.mark.parametrize(
    ("changed", "name", "level", "words"),
    [
        ({"versions": HERE | {"ray": "2.59.0"}}, "ray on nodes", Level.PROBLEM, "2.60.0 here, and 2.59.0 on two"),
        ({"versions": HERE | {"torch": ""}}, "torch on nodes", Level.PROBLEM, "not installed on two"),
        ({"clock_offset_s": 3.0}, "clocks of nodes", Level.WARNING, "that of two is 3.0 s ahead of this one"),
        ({"clock_offset_s": -3.0}, "clocks of nodes", Level.WARNING, "3.0 s behind this one"),
        ({"storage_trouble": "no such folder"}, "storage of nodes", Level.PROBLEM, "not shared with 1 node: two (no"),
        ({"trouble": "it died"}, "nodes", Level.PROBLEM, "1 node of 2 did not answer: two (it died)"),
    ],
    ids=str,
)
def test_what_is_wrong_with_one_node_names_it(changed: dict[str, Any], name: str, level: Level, words: str) -> None:
    finding = only_trouble(replace(WELL, nodes=(ONE, replace(TWO, **changed))))
    assert (finding.name, finding.level) == (name, level)
    assert words in finding.text


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    slow = replace(TWO, clock_offset_s=3.0, round_trip_s=8.0)
    assert levels(judge(replace(WELL, nodes=(ONE, slow)), HERE)) == {Level.OK}


@pytest.mark.parametrize(
    ("way", "level", "words"),
    [
        (WayReading("two", "one", trouble="timed out"), Level.PROBLEM, "1 of 2 do not work: two to one (timed out)"),
        (WayReading("two", "one", 1e6), Level.WARNING, "the slowest way has 1 MB/s, from two to one"),
    ],
    ids=str,
)
def test_a_bad_way_names_both_ends(way: WayReading, level: Level, words: str) -> None:
    finding = only_trouble(replace(WELL, ways=(WAYS[0], way)))
    assert (finding.name, finding.level) == ("ways between nodes", level)
    assert words in finding.text


def test_a_cluster_without_nodes_or_cores_is_none() -> None:
    assert only_trouble(ClusterReading(())).text == "the cluster has no node"
    bare = replace(ONE, resources={"memory": 1e9})
    assert only_trouble(ClusterReading((bare,))).text == "1 node with nothing to compute on: one"


def test_probes_send_to_each_other_and_to_nobody_else() -> None:
    receiver, sender = NodeProbe(), NodeProbe()
    host, port, token = receiver.listen("127.0.0.1")
    speed, trouble = sender.send(host, port, token, 4 * PIECE)
    assert (speed > 0, trouble) == (True, "")
    assert sender.send(host, port, bytes(len(token)), PIECE)[1]
    assert sender.send(host, port, token, PIECE)[1] == ""  # who came with a wrong word has not ended it
    assert sender.send("127.0.0.1", 1, token, PIECE)[1]


def test_storage_is_shared_where_a_question_is_read_and_an_answer_comes_back(tmp_path: Path) -> None:
    reach = Reach(str(tmp_path))
    said = NodeProbe().why_out_of_reach(reach.place, reach.nonce, "two")
    assert (said, reach.trouble_of("two", said)) == ("", "")
    assert reach.trouble_of("three", "") == "what it writes there is not seen here"
    assert "no such folder" in NodeProbe().why_out_of_reach(str(tmp_path / "elsewhere"), reach.nonce, "two")


def test_without_ray_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "find_spec", lambda _: None)
    (finding,) = examine(checks_of_engine("ray", None, None))
    assert (finding.level, finding.remedy) == (Level.PROBLEM, install_of("ray"))
    assert checks_of_engine("local", None, None) == []


def test_an_engine_is_named_as_in_a_job() -> None:
    with pytest.raises(JobFileError, match="Did you mean ray"):
        checks_of_engine("rai", None, None)
    with pytest.raises(JobFileError, match="Add the port"):
        checks_of_engine("ray", "head", None)
