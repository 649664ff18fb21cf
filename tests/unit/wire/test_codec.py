"""What is malformed is refused in words, whatever it is."""

from contextlib import suppress
from math import inf, nan
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isochrone.wire import codec
from isochrone.wire.admin import PopBody
from isochrone.wire.client_keys import keys
from isochrone.wire.http import headers
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import (
    BootId,
    Generation,
    KeyId,
    NodeId,
    ReplicaId,
)
from isochrone.wire.peers.control import FromAgent, FromRouter
from isochrone.wire.peers.report import Pulse, ReplicaProfile, ReplicaReport
from tests.builders import a_replica_report, a_report, a_spec

READER = codec.decoder(FromAgent)


def a_pulse() -> Pulse:
    return Pulse(node_id=NodeId("n"), boot_id=BootId("b"), seq=1, generation=Generation(3))


def test_a_message_comes_back_as_it_went() -> None:
    assert codec.decode(codec.encode(a_pulse()), READER) == a_pulse()


def test_a_pattern_is_told_in_words() -> None:
    reader = msgspec.json.Decoder(PopBody)
    pop = b'{"city":"Ams","country":"nl","latitude":1,"longitude":2}'
    with pytest.raises(codec.MalformedFrame) as refused:
        codec.decode_json(pop, reader)
    assert str(refused.value) == (
        "cannot read body: Expected two capital letters, such as `NL` - at `$.country`"
    )


def test_the_msgpack_package_reads_what_is_said() -> None:
    said = msgpack.unpackb(codec.encode(a_pulse()))
    assert said["type"] == "pulse"
    assert said["generation"] == 3


def test_an_unknown_field_is_ignored_and_an_unknown_message_refused() -> None:
    newer = msgspec.to_builtins(a_pulse()) | {"added_later": 1}
    assert codec.decode(msgpack.packb(newer), READER) == a_pulse()
    with pytest.raises(codec.MalformedFrame, match="cannot read frame"):
        codec.decode(msgpack.packb({"type": "never_heard_of"}), READER)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb({"type": "pulse", "node_id": 7}),
        msgpack.packb({"type": "pulse", "node_id": "n", "boot_id": "b", "seq": "x"}),
        msgpack.packb(msgpack.ExtType(5, b"code")),
    ],
    ids=["empty", "reserved", "nested", "huge-array", "wrong-type", "wrong-seq", "extension"],
)
def test_a_malformed_frame_is_refused_in_words(frame: bytes) -> None:
    with pytest.raises(codec.MalformedFrame, match="cannot read frame"):
        codec.decode(frame, READER)


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(codec.MalformedFrame, match="the limit is 8"):
        codec.decode(b"\x90" * 9, READER, bytes_max=8)


@settings(deadline=None, max_examples=200)
@given(frame=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(frame: bytes) -> None:
    for reader in (READER, codec.decoder(FromRouter)):
        with suppress(codec.MalformedFrame):
            codec.decode(frame, reader)


def test_deep_json_is_refused_in_words() -> None:
    reader = msgspec.json.Decoder(dict[str, object])
    with pytest.raises(codec.MalformedFrame, match="nested too deeply"):
        codec.decode_json(b'{"a":' + b"[" * 100_000, reader)


@given(
    st.builds(
        headers.ReportedLoad,
        st.integers(0, 10**9),
        st.integers(0, 10**9),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
    ),
    st.none() | st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
)
def test_a_load_survives_its_header(
    load: headers.ReportedLoad, others: tuple[int, int] | None
) -> None:
    if others is not None:
        load = msgspec.structs.replace(
            load, others_pending_prefill_tokens=others[0], others_decode_tokens=others[1]
        )
    assert headers.parse_load(headers.format_load(load)) == load
    # Other releases may write the fields in another order.
    fields = reversed(headers.format_load(load).split(";"))
    assert headers.parse_load(";".join(fields)) == load


def test_loads_survive_their_header_and_what_is_none_is_left_out() -> None:
    loads = {
        ReplicaId(f"m-{n}"): headers.ReportedLoad(n, 2 * n, 3, 0, n, sequences_max=n % 3)
        for n in range(headers.LOADS_MAX + 9)
    }
    read = headers.parse_loads(headers.format_loads(loads))
    assert read == dict(list(loads.items())[: headers.LOADS_MAX])
    assert headers.parse_loads("") == {}
    assert headers.parse_loads("a p=1;d=2;r=1;w=0,b,c nonsense,,d p=x;d=2;r=1;w=0") == {
        "a": headers.ReportedLoad(1, 2, 1, 0)
    }


def test_peer_replicas_survive_their_header_and_what_is_none_is_left_out() -> None:
    peers = [
        headers.PeerReplica(ReplicaId(f"m-{n}"), NodeId(f"n{n}"), f"10.0.0.{n}:7000", 10 * n, n, 62)
        for n in range(headers.PEER_REPLICAS_MAX + 2)
    ]
    read = headers.parse_peer_replicas(format_peer_replicas(peers))
    assert read == peers[: headers.PEER_REPLICAS_MAX]
    assert headers.parse_peer_replicas("") == []
    told = headers.parse_peer_replicas("a x:1 1 2 3,b n x:1 1 2 -3, n x:1 1 2 3,d n x:1 1 2 3")
    assert told == [headers.PeerReplica(ReplicaId("d"), NodeId("n"), "x:1", 1, 2, 3)]


def a_warm(replica_id: str = "r1") -> ReplicaReport:
    return a_replica_report(a_spec(replica_id))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        # Both go into headers that routers send to other nodes: the peer replicas of a request.
        ({"address": "http://10.0.0.7:9000\r\n"}, "an address such as"),
        ({"address": "10.0.0.7:9000 0 0 0,r2 n2 10.0.0.8:9000"}, "an address such as"),
        ({"replicas": (a_warm("r\r\nx-isochrone-cache-salt: b"),)}, "letters, digits"),
        ({"replicas": (a_warm("r1 n1 10.0.0.7:1 0 0 0,r2"),)}, "letters, digits"),
        # A folder of the node is called so.
        ({"replicas": (a_warm(".."),)}, "letters, digits"),
        ({"disk_bytes_per_s": nan}, "Expected `float` >= 0.0"),
        (
            {"replicas": (replace(a_warm(), profile=ReplicaProfile(decode_tokens_per_s=inf)),)},
            "Expected `float` <=",
        ),
    ],
)
def test_what_a_node_says_of_itself_is_held_to_what_it_goes_into(
    fields: dict[str, Any], said: str
) -> None:
    codec.decode(codec.encode(a_report(replicas=(a_warm(),))), READER)
    with pytest.raises(codec.MalformedFrame, match=said):
        codec.decode(codec.encode(a_report(**fields)), READER)


@given(st.text(max_size=60))
def test_any_peer_replicas_header_is_read_or_ignored(text: str) -> None:
    assert all(one.token_us >= 0 for one in headers.parse_peer_replicas(text))


@given(st.text(max_size=60))
def test_any_load_header_is_read_or_ignored(text: str) -> None:
    load = headers.parse_load(text)
    assert load is None or load.prefill_tokens >= 0


@given(st.binary(min_size=32, max_size=32))
def test_a_key_is_known_by_its_digest_only(secret: bytes) -> None:
    key_id = KeyId("abcdefghij01")
    text = keys.format_key(key_id, secret)
    parsed = keys.parse_key(text)
    assert parsed is not None
    assert parsed[0] == key_id
    assert text.split("_")[2] not in parsed[1]
    mistyped = text[:-7] + ("0" if text[-7] != "0" else "1") + text[-6:]
    assert keys.parse_key(mistyped) is None


def test_a_load_says_how_long_a_sleeping_replica_needs_to_wake() -> None:
    asleep = headers.ReportedLoad(1, 2, 1, 0, 3, 4, 5, wake_ms=250)
    assert headers.format_load(asleep) == "p=1;d=2;r=1;w=0;u=3;o=4;e=5;z=250"
    assert headers.parse_load(headers.format_load(asleep)) == asleep


def test_a_load_may_have_the_reach_of_the_cache_and_fields_of_a_later_release() -> None:
    load = headers.ReportedLoad(1, 2, 1, 0, 3, 4, 5, cache_age_ms=61_000)
    assert headers.format_load(load) == "p=1;d=2;r=1;w=0;u=3;o=4;e=5;c=61000"
    assert headers.parse_load(headers.format_load(load)) == load
    assert headers.parse_load("p=1;d=2;r=1;w=0;u=3;o=4;e=5;z=0;x=9;y=8;c=61000") == load
    none_evicted_yet = msgspec.structs.replace(load, cache_age_ms=0)
    assert headers.parse_load(headers.format_load(none_evicted_yet)) == none_evicted_yet


def test_a_load_with_every_field_is_read_in_one_step() -> None:
    load = headers.ReportedLoad(*range(1, 14))
    assert 0 not in msgspec.structs.astuple(load)
    written = headers.format_load(load)
    assert headers._USUAL_LOAD.fullmatch(written)
    assert headers.parse_load(written) == load
    # Any other order is read, too.
    assert headers.parse_load(";".join(reversed(written.split(";")))) == load
