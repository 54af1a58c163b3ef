"""What all findings come to, for programs."""

from collections.abc import Sequence
from typing import Any

from quorate.doctor.finding import Finding, Level


def count(findings: Sequence[Finding], level: Level) -> int:
    """How many findings are of a level."""
    return sum(finding.level is level for finding in findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if something keeps jobs from running as they should."""
    return 1 if count(findings, Level.PROBLEM) else 0


def to_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """All findings as one JSON document."""
    return {
        "status": "problem" if exit_code(findings) else "ok",
        "exit_code": exit_code(findings),
        "problems": count(findings, Level.PROBLEM),
        "warnings": count(findings, Level.WARNING),
        "findings": [
            {"name": each.name, "level": each.level.value, "text": each.text, "remedy": each.remedy or None}
            for each in findings
        ],
    }
