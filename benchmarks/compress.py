"""The benchmark of compressed gradients: what is learnt with a hundredth of them, and how much faster they are sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cable import PROGRAMS, RIGHTS
from benchmarks.row import Row
from benchmarks.script import LIMIT
from benchmarks.system import Needs, System, Turn

SCRIPT = "benchmarks.own.compress"
NEEDS = Needs(programs=PROGRAMS, rights=RIGHTS)
DENSE = System("quorate-dense", SCRIPT, is_ours=True, needs=NEEDS)
TOP_K = System("quorate-top-k", SCRIPT, is_ours=True, needs=NEEDS)
NO_FEEDBACK = System("quorate-no-feedback", SCRIPT, is_ours=True, needs=NEEDS)
COMPRESSION: dict[str, dict[str, Any] | None] = {
    DENSE.name: None,
    TOP_K.name: {"top_k": 0.01},
    NO_FEEDBACK.name: {"top_k": 0.01, "feedback": False},
}

LEARNT = "digits"
BYTES = "fewer_bytes"
LANES = 4
WORKERS = 2


def compression_of(system: str) -> dict[str, Any] | None:
    """What a job has for `strategy.compress`."""
    return COMPRESSION[system]


@dataclass(frozen=True)
class Compress:
    """How long is learnt, with which seeds, and how fast the cable is."""

    epochs: int = 40
    seeds: Sequence[int] = (1, 2, 3)
    mbit: float = 100.0
    warm_up: int = 2
    steps: int = 10
    name: str = "compress"
    headline: str = (
        "Top-K of 1 % against whole gradients. Digits are learnt by plain SGD: accuracy in %, the mean of all seeds. "
        "Steps are those of 2 workers in network namespaces, joined by a slow cable; its bytes are counted there."
    )

    @property
    def cable(self) -> str:
        """The case of a slow cable, by its speed."""
        return f"{self.mbit:g} Mbit/s"

    def turns(self) -> list[Turn]:
        """What is learnt, and how fast: each is one script that measures all systems by turns."""
        learnt = {
            "case": LEARNT,
            "systems": list(COMPRESSION),
            "epochs": self.epochs,
            "seeds": list(self.seeds),
            "limit": LIMIT,
        }
        sent = {
            "case": self.cable,
            "systems": [DENSE.name, TOP_K.name],
            "mbit": self.mbit,
            "warm_up": self.warm_up,
            "steps": self.steps,
            "limit": LIMIT,
        }
        return [
            Turn(TOP_K, LEARNT, learnt, also=(DENSE, NO_FEEDBACK)),
            Turn(TOP_K, self.cable, sent, also=(DENSE,)),
        ]

    def label(self, row: Row) -> str:
        """What was measured."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """Against whole gradients: points of accuracy that are lost, and how much faster a step is."""
        dense = {row.case: row for row in rows if row.system == DENSE.name}
        return [_against(row, dense[row.case]) if row.case in dense else row for row in rows]

    def remarks(self, row: Row) -> dict[str, str]:
        """Accuracy and bytes, as far as they were measured."""
        forms = {
            "accuracy": "{:.2f} %",
            "lost_points": "{:+.2f}",
            BYTES: "{:.1f}×",
            "faster": "{:.1f}×",
            "sent_bytes_per_step": "{:,.0f}",
            "received_bytes_per_step": "{:,.0f}",
        }
        names = {"lost_points": "points lost", BYTES: "fewer bytes"}
        return {
            names.get(key, key.replace("_", " ")): form.format(row.details[key])
            for key, form in forms.items()
            if key in row.details
        }


def _against(row: Row, dense: Row) -> Row:
    if row is dense:
        return row
    if "accuracy" in row.details:
        return row.with_details(lost_points=dense.details["accuracy"] - row.details["accuracy"])
    ways = ("sent_bytes_per_step", "received_bytes_per_step")
    fewer = sum(dense.details[way] for way in ways) / sum(row.details[way] for way in ways)
    return row.with_details(faster=dense.ms / row.ms, **{BYTES: fewer})
