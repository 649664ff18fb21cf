"""Alerting rules name metrics and labels that the services have."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import nodeagent.metrics
import scheduler.metrics
from isochrone.wire.errors import ErrorCode
from router.recording.metrics import Metrics

FILE = Path(__file__).parents[2] / "ops" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
NAMES = {
    f"{metric.name}_total" if metric.type == "counter" else metric.name
    for registry in (scheduler.metrics.REGISTRY, nodeagent.metrics.REGISTRY, Metrics().registry)
    for metric in registry.collect()
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_a_rule_names_what_is_there(rule: dict[str, Any]) -> None:
    named = re.findall(r"isochrone_\w+", rule["expr"])
    assert named
    assert not set(named) - NAMES
    for codes in re.findall(r'code=~"([^"]+)"', rule["expr"]):
        assert set(codes.split("|")) <= set(ErrorCode)
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "look"}
