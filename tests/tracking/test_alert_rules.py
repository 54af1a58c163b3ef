"""Alerts, dashboards and runbook speak of the same metrics, and of commands that there are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from quorate.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "how-to" / "runbook.md").read_text()
MONITORING = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
METRICS = set(re.findall(r"^\| `(quorate_[a-z_]+)`", MONITORING, re.MULTILINE))
"""Those that a scrape shows: another test holds the page against it."""


def sections() -> dict[str, str]:
    """The runbook by alert."""
    parts = re.split(r"^## (\w+)\n", RUNBOOK, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def metrics_in(expression: str) -> set[str]:
    """Of a histogram, its own name."""
    return {re.sub(r"_(sum|count|bucket)$", "", name) for name in re.findall(r"quorate_[a-z_]+", expression)}


def expressions() -> list[str]:
    files = [json.loads(file.read_text()) for file in (ROOT / "deploy/grafana/dashboards").glob("*.json")]
    panels = [target["expr"] for file in files for panel in file["panels"] for target in panel.get("targets", ())]
    return [*(rule["expr"] for rule in RULES), *panels]


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    assert list(sections()) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_severity_a_summary_and_leads_to_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    key = re.fullmatch(r'\{\{ or \$externalLabels\.(\w+) "(.*)" \}\}', page)
    assert key is not None and (ROOT / key[2]).is_file()
    assert f"external_labels: {{{key[1]}: https://" in MONITORING, "how it is made absolute"
    assert anchor == rule["alert"].lower(), "as the anchor of its heading is made"
    for part in ("**What it means.**", "**What to look at.**", "**What to do.**"):
        assert sections()[rule["alert"]].count(part) == 1


def test_alerts_and_dashboards_ask_for_metrics_that_there_are() -> None:
    asked = set().union(*map(metrics_in, expressions()))
    assert asked <= METRICS
    shown_nowhere = METRICS - asked
    assert shown_nowhere <= {"quorate_job_info"}, "it is what runs are chosen by"


def test_the_commands_of_the_runbook_are_those_that_there_are() -> None:
    verbs: Any = get_command(app)
    for words in re.findall(r"\bquorate ([a-z]+(?: [a-z]+)?)\b", RUNBOOK):
        verb, _, inner = words.partition(" ")
        assert verb in verbs.commands, f"quorate {verb}"
        if hasattr(verbs.commands[verb], "commands"):
            assert inner in verbs.commands[verb].commands, f"quorate {words}"
    assert RUNBOOK.count("quorate resume") >= 3
