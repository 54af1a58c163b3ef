"""The startup benchmark: from the command to the first complete step, and what a command takes that starts no job."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.row import Row, ratios_in_words
from benchmarks.system import System, Turn

# One stopwatch starts the commands; the runs of a program that has trained before begin when it asks for them.
QUORATE = System("quorate", "benchmarks.own.startup", is_ours=True)
PLAIN = System("plain-python", "benchmarks.own.startup")
TORCHRUN = System("torchrun", "benchmarks.own.startup")
HELP = System("quorate-help", "benchmarks.own.startup", is_ours=True)
IMPORT = System("quorate-import", "benchmarks.own.startup", is_ours=True)
WARM = System("quorate-warm", "benchmarks.own.warm_runs", is_ours=True)
SYSTEMS = (QUORATE, WARM, PLAIN, TORCHRUN, HELP, IMPORT)
PROCESSES = {QUORATE: 2, WARM: 2, PLAIN: 1, TORCHRUN: 2, HELP: 1, IMPORT: 1}


@dataclass(frozen=True)
class Startup:
    """Which commands are started."""

    systems: Sequence[System] = SYSTEMS
    name: str = "startup"
    headline: str = "From the command to the first complete step, on 2 workers. × is a peer's time divided by ours."

    def turns(self) -> list[Turn]:
        """Each command once."""
        return [
            Turn(system, "first step", {"system": system.name, "processes": PROCESSES[system]})
            for system in self.systems
        ]

    def label(self, row: Row) -> str:
        """All are compared, though plain Python is one process."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """The ratios say it all."""
        return list(rows)

    def remarks(self, row: Row) -> dict[str, str]:
        """How many processes, what a warm run costs beside its steps, and how the peers compare."""
        beyond = row.details.get("beyond_ms")
        more = {} if beyond is None else {"beyond": f"{beyond:,.0f} ms", "CPU": f"{row.details['cpu_ms']:,.0f} ms"}
        return {"processes": str(row.processes), **more, **ratios_in_words(row)}
