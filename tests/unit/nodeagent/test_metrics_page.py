"""Merging the metrics pages of a node's engines."""

from time import process_time

import pytest
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


HOSTILE = """\
# TYPE steps_total endless
# HELP steps_total a\0b
# TYPE isochrone_node_connected gauge
isochrone_node_connected 0
isochrone_node_connected{pop="ams"} 0
}{ no sample
no_value
two_values 1 2 3
word_for_value word
long_number 1_000
open{a="b
twice{a="1",a="2"} 1
both{replica="x",exported_replica="y"} 1
escape{a="\\x"} 1
control{a="\1"} 1
\x1b]52;c;ZXZpbA==\a
named{replica="another",a="1,replica=2"} 1e3 1700000000
last +Inf
"""


def test_no_line_of_an_engine_hides_the_metrics_of_others() -> None:
    """Prometheus took nothing of the whole node's page."""
    page = merge_pages([("bad", HOSTILE), ("r1", ONE)])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert sorted(families) == ["last", "named", "steps", "wait_s"]
    assert families["steps"].documentation == "Steps."
    (named,) = families["named"].samples
    assert named.labels == {"replica": "bad", "exported_replica": "another", "a": "1,replica=2"}


@pytest.mark.parametrize(
    "line",
    [
        "a" + " " * 200_000 + "x",
        'a{b="c"' + " " * 200_000 + "} x",
        "a " + "1" * 200_000 + "x",
        'a{b="' + "\\\\" * 100_000 + "x",
        "a{" + 'b="c",' * 30_000 + "x",
        "# HELP a" + " " * 200_000 + "\0",
    ],
    ids=["spaces", "spaces in labels", "digits", "backslashes", "labels", "help"],
)
def test_a_hostile_line_costs_its_length(line: str) -> None:
    began_s = process_time()
    assert merge_pages([("bad", line)]) == ""
    assert process_time() - began_s < 1.0


def test_without_engines_the_merged_page_is_empty() -> None:
    assert merge_pages([]) == ""
