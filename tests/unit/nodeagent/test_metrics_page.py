"""Engines' metrics on their node's page."""

from prometheus_client.parser import text_string_to_metric_families

from nodeagent.api.metrics_page import joined

ONE = """\
# HELP steps_total Steps.
# TYPE steps_total counter
steps_total 3.0
# HELP wait_s Waiting.
# TYPE wait_s histogram
wait_s_bucket{le="1.0"} 2.0
wait_s_bucket{le="+Inf"} 2.0
wait_s_count 2.0
wait_s_sum 0.5
# a remark
"""
TWO = """\
# HELP steps_total In other words.
# TYPE steps_total counter
steps_total{} 5.0
untold 1
"""


def test_each_sample_names_its_replica_and_each_family_is_told_once() -> None:
    page = joined([("r1", ONE), ("r2", TWO), ("r3", "")])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert sorted(families) == ["steps", "untold", "wait_s"]
    told = {sample.labels["replica"]: sample.value for sample in families["steps"].samples}
    assert told == {"r1": 3.0, "r2": 5.0}
    assert families["steps"].documentation == "Steps."
    assert families["wait_s"].samples[0].labels == {"replica": "r1", "le": "1.0"}
    assert page.count("# TYPE steps_total") == 1


def test_no_engine_tells_nothing() -> None:
    assert joined([]) == ""
