"""Alerting rules and documents name metrics, labels and sections that are there."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import nodeagent.metrics
import scheduler.metrics
from isochrone.wire.errors import ErrorCode
from router.recording.metrics import Metrics
from tests.unit.documents import anchors_of

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ops" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
REGISTRIES = (scheduler.metrics.REGISTRY, nodeagent.metrics.REGISTRY, Metrics().registry)
NAMES = {
    f"{metric.name}_total" if metric.type == "counter" else metric.name
    for registry in REGISTRIES
    for metric in registry.collect()
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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_a_rule_names_what_is_there(rule: dict[str, Any]) -> None:
    named = re.findall(r"isochrone_\w+", rule["expr"])
    assert named or "up{" in rule["expr"]
    assert not set(named) - NAMES
    for codes in re.findall(r'code=~"([^"]+)"', rule["expr"]):
        assert set(codes.split("|")) <= set(ErrorCode)
    labels = OF_TARGETS.union(*(LABELS[name] for name in named))
    by = re.search(r"\bby \((\w+)\)", rule["expr"])
    used = re.findall(r"(\w+)=~?\"", rule["expr"]) + ([by[1]] if by else [])
    shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert {*used, *shown} <= labels
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
