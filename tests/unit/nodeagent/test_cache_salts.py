"""No body reaches an engine without the tenant's salt, however leniently the engine reads it."""

import json
import shutil
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isochrone.service.trust.identity import Authority
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import ClusterId, Epoch
from isochrone.wire.peers.control import CacheSaltSecret, Welcome
from nodeagent.drivers.request_body import with_fields
from nodeagent.host.cache_salts import CacheSalts, load_cache_salts

SALT = "the tenant's salt"
PIECES = (
    *(b'"cache_salt"', b'"cache\\u005fsalt"', b'"cache_salt\\ud800"', b'"\\ud800"', b'"\\\\ud800"'),
    *(
        b":",
        b",",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b" ",
        b"\n",
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
    ),
    *(b'"victim"', b'"model"', b'"messages"', b"1", b"1.50", b"1e999", b"NaN", b"null", b"true"),
    *(b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 90, b"]" * 90, b"[" * 970, b"]" * 970),
)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["cache_salt", "model", "messages", "\ud800", "cache_salt\x00"]) | st.text()
OBJECTS = st.dictionaries(KEYS, VALUES, min_size=1).map(json.dumps)


def lenient_parse(body: bytes) -> Any:
    """Read JSON as Python engines do: UTF-16, UTF-32, NaN and lone surrogates are accepted."""
    return json.loads(body)


def check_salted(body: bytes) -> bool:
    """Return whether the body is forwarded; if so, every key that names the salt has ours."""
    try:
        salted = with_fields(body, {"cache_salt": SALT})
    except ApiError:
        return False
    pairs: list[tuple[str, Any]] = json.loads(salted, object_pairs_hook=list)
    assert [value for name, value in pairs if name == "cache_salt"] == [SALT]
    assert lenient_parse(salted)["cache_salt"] == SALT
    return True


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))
@example(b'{"cache_salt":"victim","\\ud800":1}')
@example(b'{"cache_salt":"victim","a":' + b"[" * 970 + b"]" * 970 + b"}")
def test_no_text_reaches_an_engine_without_the_salt(body: bytes) -> None:
    check_salted(body)


@given(OBJECTS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_no_object_reaches_an_engine_without_the_salt(text: str, encoding: str) -> None:
    is_forwarded = check_salted(text.encode(encoding))
    assert is_forwarded <= (encoding == "utf-8")


@given(OBJECTS, st.data())
def test_no_mutated_object_reaches_an_engine_without_the_salt(
    text: str, data: st.DataObject
) -> None:
    body = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body)))
        body[position : position + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(PIECES)
        )
    check_salted(bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": "\\ud800"}',
        b'{"messages": "\xff"}',
        b'{"messages": ' + b"[" * 96 + b"]" * 96 + b"}",
    ],
    ids=["surrogate", "latin-1", "deep"],
)
def test_a_node_refuses_what_parsers_may_read_differently(body: bytes) -> None:
    """The router refuses it, too; a node does not rely on that."""
    with pytest.raises(ApiError, match="cannot use the request body"):
        with_fields(body, {"cache_salt": SALT})


async def test_nodes_with_the_clusters_secret_compute_equal_salts(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "a", "test", datetime.now(UTC))
    again = Authority.load(tmp_path / "a")
    secrets = {version: authority.cache_salt_secret(version) for version in (1, 2)}
    assert secrets[1] == again.cache_salt_secret(1) != secrets[2]
    other = Authority.create(tmp_path / "b", "test", datetime.now(UTC))
    assert other.cache_salt_secret(1) != secrets[1]
    folders = [tmp_path / name for name in ("n1", "n2")]
    for folder in folders:
        folder.mkdir()
    nodes = [load_cache_salts(folder) for folder in folders]
    assert nodes[0].salt_of("acme") != nodes[1].salt_of("acme")
    for version, secret in secrets.items():
        offered = CacheSaltSecret(version=version, secret=secret)
        welcome = Welcome(cluster_id=ClusterId("c"), epoch=Epoch(1), cache_salt=offered)
        assert repr(secret) not in f"{welcome!r} {offered}" and "version" in str(welcome)
        before = nodes[0].salt_of("acme")
        for salts in nodes:
            await salts.take(offered)
        assert nodes[0].salt_of("acme") == nodes[1].salt_of("acme") != before
        assert secret.hex() not in nodes[0].salt_of("acme") and "acme" not in repr(nodes[0])
    # A restart without a scheduler, and a scheduler of a release that sends no secret.
    restarted = load_cache_salts(folders[0])
    await restarted.take(None)
    assert restarted.salt_of("acme") == nodes[1].salt_of("acme")
    assert stat.S_IMODE((folders[0] / "cluster_cache_salt.key").stat().st_mode) == 0o600


async def test_a_full_disk_does_not_keep_a_node_from_the_clusters_salts(tmp_path: Path) -> None:
    folder = tmp_path / "n1"
    folder.mkdir()
    salts = load_cache_salts(folder)
    shutil.rmtree(folder)
    await salts.take(CacheSaltSecret(version=1, secret=bytes(32)))
    assert salts.salt_of("acme") == CacheSalts(bytes(32)).salt_of("acme")


def test_salts_differ_by_tenant_and_node_and_survive_a_restart(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    salts = load_cache_salts(first)
    assert salts.salt_of("acme") not in ("acme", salts.salt_of("beta"))
    assert load_cache_salts(first).salt_of("acme") == salts.salt_of("acme")
    assert load_cache_salts(other).salt_of("acme") != salts.salt_of("acme")
    (secret,) = first.iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
