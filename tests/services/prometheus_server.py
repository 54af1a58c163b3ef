"""A real Prometheus with the configuration and the rules of `deploy`, only quicker, and what it is asked."""

import json
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from services.servers import Service, free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
QUICK = "400ms"
WINDOW = "10s"
"""Over which rules and panels look back here."""


def quick_rules(text: str) -> str:
    """The same rules for a job of seconds: they look back a little, and do not wait."""
    return re.sub(r"\bfor: \w+", "for: 0s", re.sub(r"\[\d+[mh]\]", f"[{WINDOW}]", text))


class PrometheusServer(Service):
    """Scrapes the jobs that a folder of runs lists, every so often."""

    def __init__(self, folder: Path, runs: Path, every: str = QUICK) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": QUICK}
        del config["alerting"]
        (scraped,) = config["scrape_configs"]
        (listed,) = scraped["file_sd_configs"]
        listed |= {"files": [str(runs / Path(listed["files"][0]).name)], "refresh_interval": "1s"}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yaml").write_text(quick_rules(RULES.read_text()))
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"]
        super().__init__(command, f"{self.url}/-/ready", folder / "prometheus.log")

    def query(self, expression: str) -> list[float]:
        """The values of now; without those that are no number."""
        found = self._ask("query", query=expression)["result"]
        values = [float(one["value"][1]) for one in found]
        return [value for value in values if value == value]

    def is_firing(self, alert: str) -> bool:
        return bool(self.query(f'ALERTS{{alertname="{alert}", alertstate="firing"}}'))

    def has_fired(self, alert: str) -> bool:
        return bool(self.query(f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[1h])'))

    def _ask(self, what: str, **parameters: str) -> dict[str, Any]:
        address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data
