"""A report is written when it changes what a plan, a route or an operator reads."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import BootId, Generation, ReplicaId
from isochrone.wire.peers.report import Refusal, ReplicaProfile, ReplicaReport, ReplicaState
from scheduler.decide.membership import has_changed
from tests.builders import GIB, a_device, a_replica_report, a_report, a_spec

WARM = msgspec.structs.replace(
    a_replica_report(a_spec("r1")),
    profile=ReplicaProfile(load_s=30.0, prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0),
)
WRITTEN = a_report(replicas=(WARM,), disk_free_bytes=100 * GIB)


def changed(**fields: Any) -> ReplicaReport:
    return msgspec.structs.replace(WARM, **fields)


def with_rates(**fields: float) -> ReplicaReport:
    return changed(profile=msgspec.structs.replace(WARM.profile, **fields))


@pytest.mark.parametrize(
    ("fields", "is_changed"),
    [
        ({"seq": 2}, False),
        ({"disk_free_bytes": 99 * GIB}, False),
        ({"replicas": (changed(since_s=99.0),)}, False),
        ({"replicas": (with_rates(decode_tokens_per_s=109.0),)}, False),
        ({"generation": Generation(2)}, True),
        ({"boot_id": BootId("boot-2")}, True),
        ({"address": "http://elsewhere"}, True),
        ({"devices": ()}, True),
        ({"devices": (a_device(healthy=False),)}, True),
        ({"disk_free_bytes": 80 * GIB}, True),
        ({"artifacts": ("ab" * 32,)}, True),
        ({"in_host_memory": ("ab" * 32,)}, True),
        ({"failure_domain": "rack-a"}, True),
        ({"lacking_engines": {"vllm": "it is not installed"}}, True),
        ({"disk_bytes_per_s": 1e9}, True),
        ({"fetch_bytes_per_s": 1e9}, True),
        ({"refusals": (Refusal(replica_id=ReplicaId("x"), reason="no"),)}, True),
        ({"replicas": ()}, True),
        ({"replicas": (WARM, a_replica_report(a_spec("r2")))}, True),
        ({"replicas": (changed(state=ReplicaState.FAILED),)}, True),
        ({"replicas": (changed(reason="slow"),)}, True),
        ({"replicas": (changed(restarts=1),)}, True),
        ({"replicas": (changed(spec=a_spec("r1", version=2)),)}, True),
        ({"replicas": (with_rates(decode_tokens_per_s=120.0),)}, True),
        ({"replicas": (with_rates(prefill_tokens_per_s=0.0),)}, True),
    ],
)
def test_a_change_counts_only_in_what_is_read(fields: dict[str, Any], is_changed: bool) -> None:
    seq = fields.pop("seq", 3)
    defaults: dict[str, Any] = {"replicas": (WARM,), "disk_free_bytes": 100 * GIB}
    if fields.get("devices"):
        device = fields["devices"][0]
        fields["devices"] = (device,)
    assert has_changed(WRITTEN, a_report(seq=seq, **{**defaults, **fields})) is is_changed


def test_a_fetch_in_progress_always_counts_as_a_change() -> None:
    fetching = changed(state=ReplicaState.FETCHING, fetched_bytes=1)
    written = a_report(replicas=(fetching,))
    assert has_changed(written, a_report(seq=2, replicas=(fetching,)))
