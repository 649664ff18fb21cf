"""A report that is valid in type and absurd in its values is refused before it is stored."""

from math import inf, nan
from typing import Any

import pytest
from msgspec.structs import replace

from isochrone.wire import codec
from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.peers.control import FromAgent
from isochrone.wire.peers.report import (
    ARTIFACTS_MAX,
    DEVICES_MAX,
    REPLICAS_MAX,
    Refusal,
    ReplicaProfile,
)
from tests.builders import a_device, a_replica_report, a_report, a_spec

READER = codec.decoder(FromAgent)
MEGABYTE = "x" * 2**20
REPLICA = a_replica_report(a_spec())


def measured(**fields: Any) -> dict[str, Any]:
    return {"replicas": (replace(REPLICA, profile=ReplicaProfile(**fields)),)}


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": (a_device(),) * (DEVICES_MAX + 1)},
        {"devices": (replace(a_device(), device_class=MEGABYTE),)},
        {"devices": (replace(a_device(), device_id=DeviceId(MEGABYTE)),)},
        {"replicas": (REPLICA,) * (REPLICAS_MAX + 1)},
        {"refusals": (Refusal(replica_id=ReplicaId("r"), reason="no"),) * (REPLICAS_MAX + 1)},
        {"artifacts": ("f" * 64,) * (ARTIFACTS_MAX + 1)},
        {"in_host_memory": ("f" * 64,) * (ARTIFACTS_MAX + 1)},
        {"failure_domain": MEGABYTE},
        {"address": "a" * 1000},
        {"disk_bytes_per_s": nan},
        {"fetch_bytes_per_s": inf},
        {"rank_ports": (0, 70_000)},
        {"lacking_engines": {"vllm": MEGABYTE}},
        {"lacking_engines": {str(number): "" for number in range(65)}},
        measured(decode_tokens_per_s=nan),
        measured(prefill_tokens_per_s=-1.0),
        measured(load_s=inf),
        measured(memory_bytes=-1),
        measured(used_bytes=2**63),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_absurd_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(codec.MalformedFrame):
        codec.decode(codec.encode(a_report(**fields)), READER)


def test_as_much_as_a_node_may_have_is_read() -> None:
    report = a_report(
        devices=(a_device(),) * DEVICES_MAX,
        replicas=(REPLICA,) * REPLICAS_MAX,
        artifacts=("f" * 64,) * ARTIFACTS_MAX,
    )
    assert codec.decode(codec.encode(report), READER) == report
