"""The benchmark of links: what encryption costs a frame on its way between two hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cable import PROGRAMS, RIGHTS
from benchmarks.row import Row
from benchmarks.script import LIMIT
from benchmarks.size import UNITS, size_in_words
from benchmarks.system import Needs, System, Turn

SCRIPT = "benchmarks.own.links"
NEEDS = Needs(programs=PROGRAMS, rights=RIGHTS)
TLS = System("tls", SCRIPT, is_ours=True, needs=NEEDS)
PLAIN = System("plain", SCRIPT, is_ours=True, needs=NEEDS)
SYSTEMS = (TLS, PLAIN)

MBIT = 1000.0
SIZE = 25 * UNITS["MB"]


@dataclass(frozen=True)
class Links:
    """How fast the cable is, and how often a frame of this size is sent over each link, by turns."""

    size: int = SIZE
    mbit: float = MBIT
    repeats: int = 20
    name: str = "links"
    headline: str = (
        "A frame over TCP between 2 workers in network namespaces, joined by a cable, until the sender knows that it "
        "has come. Slower is against the plain link."
    )

    @property
    def case(self) -> str:
        """25 MB at 1000 Mbit/s."""
        return f"{size_in_words(self.size)} at {self.mbit:g} Mbit/s"

    def turns(self) -> list[Turn]:
        """One: both links join the same processes over the same cable."""
        order = {"case": self.case, "mbit": self.mbit, "size": self.size, "repeats": self.repeats, "limit": LIMIT}
        return [Turn(TLS, self.case, order, also=(PLAIN,))]

    def label(self, row: Row) -> str:
        """25 MB at 1000 Mbit/s."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """The encrypted link against the plain one."""
        plain = {row.case: row.ms for row in rows if row.system == PLAIN.name}
        return [
            row.with_details(slower_percent=(row.ms / plain[row.case] - 1) * 100)
            if row.system == TLS.name and row.case in plain
            else row
            for row in rows
        ]

    def remarks(self, row: Row) -> dict[str, str]:
        """The processor time of both ends, and how much slower it is."""
        ends = {end: f"{row.details[f'{end}_cpu_ms']:.0f} ms" for end in ("sender", "receiver")}
        slower = row.details.get("slower_percent")
        return {f"{end}'s CPU": ms for end, ms in ends.items()} | (
            {} if slower is None else {"slower": f"{slower:.1f} %"}
        )
