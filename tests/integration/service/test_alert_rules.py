"""Each alerting rule fires for what it is about, and not before, as promtool evaluates it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]

FILE: Final = Path(__file__).parents[3] / "ops" / "prometheus" / "alerts.yml"
RULES: Final = {
    rule["alert"]: rule for rule in yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
}

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool (Debian's package prometheus)"
)


class Firing(NamedTuple):
    """A rule, series that are healthy for 40 minutes and then not, and what it says at 70.

    `labels` are those of the alert beside its severity.
    """

    alert: str
    series: dict[str, str]
    summary: str
    labels: dict[str, str]


FLAPPING: Final = " ".join(["0 1"] * 20)
"""Samples of something that is there half of the time, a minute each."""

CASES: Final = (
    Firing(
        "IsochroneServiceDown",
        {'up{job="isochrone-router", instance="r:1"}': "1x40 0x40", 'up{job="other"}': "0x80"},
        "r:1 (isochrone-router) has answered 0% of the scrapes of ten minutes.",
        {"job": "isochrone-router", "instance": "r:1"},
    ),
    Firing(
        "IsochroneServiceDown",
        {'up{job="isochrone-router", instance="r:1"}': f"1x40 {FLAPPING}"},
        "r:1 (isochrone-router) has answered 54.55% of the scrapes of ten minutes.",
        {"job": "isochrone-router", "instance": "r:1"},
    ),
    Firing(
        "IsochroneNoSchedulerActs",
        {
            'isochrone_scheduler_acting{instance="a"}': "1x40 0x40",
            'isochrone_scheduler_acting{instance="b"}': "0x80",
        },
        "No scheduler is acting. Warm replicas keep serving; nothing is placed or replaced.",
        {},
    ),
    Firing(
        "IsochroneNoSchedulerActs",
        {'isochrone_scheduler_acting{instance="a"}': "1x40 _x40"},
        "No scheduler is acting. Warm replicas keep serving; nothing is placed or replaced.",
        {},
    ),
    Firing(
        "IsochronePlacementFrozen",
        {'isochrone_scheduler_frozen{instance="a"}': "0x40 1x40"},
        "Many nodes fell silent at once. No replica is moved until they are heard again.",
        {},
    ),
    Firing(
        "IsochroneClockWrong",
        {'isochrone_scheduler_wrong_clocks{instance="a", role="agent"}': "0x40 2x40"},
        "The clocks of 2 peers (role agent) differ from the acting scheduler's by more than a"
        " minute.",
        {"role": "agent"},
    ),
    Firing(
        "IsochroneCertificateExpires",
        {
            'isochrone_router_tls_certificate_expires_at_seconds{instance="r"}': (
                "2592000x40 604800x40"
            ),
            'isochrone_scheduler_tls_certificate_expires_at_seconds{instance="a"}': "0x80",
        },
        "The `tls_certificate` of r expires in 6d 22h 50m 0s.",
        {"instance": "r"},
    ),
    Firing(
        "IsochroneDeploymentShortOfReplicas",
        {'isochrone_scheduler_unmet{instance="a"}': "0x40 3x40"},
        "3 requirements of deployments cannot be met by any node.",
        {},
    ),
    Firing(
        "IsochroneJobFails",
        {
            'isochrone_scheduler_job_turns{instance="a", loop="place", outcome="failed"}': (
                "0x40 1+1x40"
            ),
            'isochrone_scheduler_job_turns{instance="a", loop="place", outcome="ended"}': "0+9x80",
        },
        "The periodic job place of a failed 10 times in ten minutes.",
        {"instance": "a", "loop": "place", "outcome": "failed"},
    ),
    Firing(
        "IsochroneRouterTableOld",
        {'isochrone_router_table_age_seconds{instance="r"}': "1x40 400x40"},
        "r uses a route table that no scheduler has confirmed for 6m 40s.",
        {"instance": "r"},
    ),
    Firing(
        "IsochroneNodeDisconnected",
        {'isochrone_node_connected{instance="n"}': "1x40 0x40"},
        "n was connected to a scheduler for 0% of ten minutes. It keeps serving, but its replicas"
        " are replaced elsewhere.",
        {"instance": "n"},
    ),
    Firing(
        "IsochroneNodeDisconnected",
        {'isochrone_node_connected{instance="n"}': f"1x40 {FLAPPING}"},
        "n was connected to a scheduler for 54.55% of ten minutes. It keeps serving, but its"
        " replicas are replaced elsewhere.",
        {"instance": "n"},
    ),
    Firing(
        "IsochroneReplicaKeepsFailing",
        {'isochrone_node_replica_restarts{instance="n", replica="chat-1"}': "1x40 2+1x3 5x40"},
        "chat-1 failed 4 times in half an hour.",
        {"instance": "n", "replica": "chat-1"},
    ),
    Firing(
        "IsochroneOutOfCapacity",
        {
            'isochrone_router_errors_total{instance="r", code="out_of_capacity"}': "0x40 60+60x40",
            'isochrone_router_requests_total{instance="r", outcome="complete"}': "0+600x80",
        },
        "1 requests a second are refused because no replica has capacity.",
        {},
    ),
    Firing(
        "IsochroneReplicasUnhealthy",
        {'isochrone_router_panicking_deployments{instance="r"}': "0x40 2x40"},
        "r finds more than half of the replicas of 2 deployments unhealthy.",
        {"instance": "r"},
    ),
    Firing(
        "IsochroneRetriesDenied",
        {'isochrone_router_retries_denied_total{instance="r"}': "0x40 60+60x40"},
        "So many attempts fail at r that its retry budget is exhausted.",
        {"instance": "r"},
    ),
    Firing(
        "IsochroneUsageDelayed",
        {'isochrone_router_usage_spool_bytes{instance="r"}': "0x40 33554432x40"},
        "32MiB of usage on r are waiting to be stored.",
        {"instance": "r"},
    ),
    Firing(
        "IsochroneUsageLost",
        {'isochrone_router_usage_rows_dropped_total{instance="r"}': "0x40 6+6x40"},
        "r lost the usage of 60 requests because its spool is full.",
        {"instance": "r"},
    ),
)


def promtool_case(case: Firing) -> dict[str, Any]:
    """Return a case as promtool reads it."""
    rule = RULES[case.alert]
    fires = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": case.summary},
    }
    return {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": values} for series, values in case.series.items()
        ],
        "alert_rule_test": [
            {"eval_time": "40m", "alertname": case.alert, "exp_alerts": []},
            {"eval_time": "70m", "alertname": case.alert, "exp_alerts": [fires]},
        ],
    }


def test_every_rule_has_a_case() -> None:
    assert {case.alert for case in CASES} == RULES.keys()


def test_the_rules_fire_for_what_they_are_about(tmp_path: Path) -> None:
    file = tmp_path / "test.yml"
    cases = [promtool_case(case) for case in CASES]
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
