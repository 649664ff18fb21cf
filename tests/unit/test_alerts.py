"""Alerting rules and documents name metrics and labels that the services have."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import nodeagent.metrics
import scheduler.metrics
from isochrone.wire.errors import ErrorCode
from router.recording.metrics import Metrics

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ops" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
NAMES = {
    f"{metric.name}_total" if metric.type == "counter" else metric.name
    for registry in (scheduler.metrics.REGISTRY, nodeagent.metrics.REGISTRY, Metrics().registry)
    for metric in registry.collect()
}

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
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "look"}


@pytest.mark.parametrize("document", ["api", "engine", "failures", "kv", "operations", "security"])
def test_a_document_names_metrics_as_they_are_scraped(document: str) -> None:
    text = (ROOT / "docs" / f"{document}.md").read_text()
    named = re.findall(r"`(isochrone_(?:router|node|scheduler)_[a-z_]+[a-z])[`{]", text)
    assert not set(named) - NAMES - OF_TRACES
