"""Merging the metrics pages of a node's engines."""

from prometheus_client.parser import text_string_to_metric_families

from nodeagent.api.metrics_page import merge_pages

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
# HELP steps_total Another help text.
# TYPE steps_total counter
steps_total{} 5.0
no_help 1
"""


def test_each_sample_gets_its_replica_and_each_family_appears_once() -> None:
    page = merge_pages([("r1", ONE), ("r2", TWO), ("r3", "")])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert sorted(families) == ["no_help", "steps", "wait_s"]
    steps = {sample.labels["replica"]: sample.value for sample in families["steps"].samples}
    assert steps == {"r1": 3.0, "r2": 5.0}
    assert families["steps"].documentation == "Steps."
    assert families["wait_s"].samples[0].labels == {"replica": "r1", "le": "1.0"}
    assert page.count("# TYPE steps_total") == 1


def test_without_engines_the_merged_page_is_empty() -> None:
    assert merge_pages([]) == ""
