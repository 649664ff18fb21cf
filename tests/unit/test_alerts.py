"""Alerting rules, dashboard and documents name metrics, labels and sections that are there."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import nodeagent.metrics
import scheduler.metrics
from isochrone.wire.errors import ErrorCode
from router.recording.metrics import Metrics
from tests.unit.dashboard import DashboardQuery, dashboard, dashboard_queries
from tests.unit.documents import anchors_of

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ops" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
REGISTRIES = (scheduler.metrics.REGISTRY, nodeagent.metrics.REGISTRY, Metrics().registry)
SUFFIXES = {"counter": ("_total",), "histogram": ("", "_bucket", "_sum", "_count")}
NAMES = {
    f"{metric.name}{suffix}"
    for registry in REGISTRIES
    for metric in registry.collect()
    for suffix in SUFFIXES.get(metric.type, ("",))
}
LABELS: dict[str, set[str]] = {
    name: set(getattr(metric, "_labelnames", ()))
    for registry in REGISTRIES
    for name, metric in registry._names_to_collectors.items()
}
OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus gives every series. It renames those of a service that are called so."""

OF_TRACES = {
    f"isochrone_{service}_trace_spans_dropped_total" for service in ("router", "node", "scheduler")
}
"""Defined where spans are exported, by services that have a collector."""

OF_SETTINGS = {"pop"}
"""Labels that ops/prometheus/prometheus.yml gives routers and nodes."""

QUERIES = dashboard_queries()


def labels_used(expression: str) -> set[str]:
    """Return the labels that an expression selects or sums by."""
    groups = re.findall(r"\bby \(([^)]+)\)", expression)
    by = [label for labels in groups for label in labels.split(", ")]
    return {*re.findall(r"(\w+)=~?\"", expression), *by}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.panel}-{query.legend}")
def test_a_query_of_the_dashboard_names_what_is_there(query: DashboardQuery) -> None:
    named = re.findall(r"isochrone_\w+", query.expression)
    assert named or "up{" in query.expression
    assert not set(named) - NAMES
    of_all = set.intersection(*(LABELS[name] for name in named)) if named else set()
    labels = of_all | OF_TARGETS | {"le"}
    if not any(name.startswith("isochrone_scheduler_") for name in named):
        labels |= OF_SETTINGS
    assert labels_used(query.expression) <= labels
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels_used(query.expression)
    # A selection in the head of the dashboard holds for all panels of routers and nodes.
    assert query.expression.count("$pop") == len(
        [name for name in named if not name.startswith("isochrone_scheduler_")]
    )
    assert not re.findall(r"\$(?!pop\b|deployment\b|__rate_interval\b)", query.expression)


def test_the_dashboard_shows_each_series_by_a_legend_of_its_own() -> None:
    shown = [(query.panel, query.legend) for query in QUERIES]
    assert len(set(shown)) == len(shown)
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_the_dashboard_selects_by_labels_that_are_there() -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            named = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            assert named is not None
            assert named[1] in NAMES
            assert named[2] in LABELS[named[1]] | OF_SETTINGS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_a_rule_names_what_is_there(rule: dict[str, Any]) -> None:
    named = re.findall(r"isochrone_\w+", rule["expr"])
    assert named or "up{" in rule["expr"]
    assert not set(named) - NAMES
    for codes in re.findall(r'code=~"([^"]+)"', rule["expr"]):
        assert set(codes.split("|")) <= set(ErrorCode)
    labels = OF_TARGETS.union(*(LABELS[name] for name in named))
    shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert {*labels_used(rule["expr"]), *shown} <= labels
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "look", "runbook"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_a_rule_names_the_section_that_says_what_to_do(rule: dict[str, Any]) -> None:
    document, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors_of((ROOT / document).read_text())
    assert f"| `{rule['alert']}` |" in (ROOT / document).read_text()


def test_no_metric_has_a_label_that_prometheus_renames() -> None:
    assert not {name for name, labels in LABELS.items() if labels & OF_TARGETS}


@pytest.mark.parametrize("document", ["api", "engine", "failures", "kv", "operations", "security"])
def test_a_document_names_metrics_as_they_are_scraped(document: str) -> None:
    text = (ROOT / "docs" / f"{document}.md").read_text()
    named = re.findall(r"`(isochrone_(?:router|node|scheduler)_[a-z_]+[a-z])[`{]", text)
    assert not set(named) - NAMES - OF_TRACES
    for name, label in re.findall(r"`(isochrone_[a-z_]+){(\w+)=", text):
        assert label in LABELS[name]
