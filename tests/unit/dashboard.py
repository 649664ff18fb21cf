"""The dashboard of ops/prometheus, as tests read it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[2] / "ops" / "prometheus" / "dashboard.json"
RATE_INTERVAL = "1m"


class DashboardQuery(NamedTuple):
    """One query of a panel: its expression, with Grafana's variables, and its legend."""

    panel: str
    expression: str
    legend: str


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def dashboard_queries() -> list[DashboardQuery]:
    """Return the queries of all panels."""
    return [
        DashboardQuery(panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def evaluable(expression: str) -> str:
    """Return an expression as Grafana sends it to Prometheus if everything is selected."""
    expression = expression.replace("$__rate_interval", RATE_INTERVAL)
    for variable in ("pop", "deployment"):
        expression = expression.replace(f'"${variable}"', '".*"')
    return expression
