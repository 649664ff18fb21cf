"""A peer without an identity of its own says what to do."""

import logging
from pathlib import Path

import pytest

from isochrone.service.config import ConfigError
from isochrone.service.trust.identity import Identity, save_identity
from isochrone.service.trust.joining import JOIN_TIMEOUT_S, load_or_join
from isochrone.wire.ids import ClusterId, PopId
from isochrone.wire.peers.control import PeerRole, join_token_command
from scheduler.api.control.join import BODY_TIMEOUT_S
from scheduler.store.pool import STATEMENT_TIMEOUT_S


@pytest.mark.parametrize(
    ("role", "command"),
    [
        (PeerRole.AGENT, "`isochrone nodes join-token POP`"),
        (PeerRole.ROUTER, "`isochrone nodes join-token POP --role router`"),
    ],
)
async def test_a_peer_without_an_identity_names_the_command(
    role: PeerRole, command: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=command):
        await load_or_join(urls=[], token_file=None, role=role, name="x", folder=tmp_path)


def test_a_command_names_the_pop_and_the_name() -> None:
    command = join_token_command(PeerRole.ROUTER, "ams", "r1")
    assert command == "isochrone nodes join-token ams --name r1 --role router"


def test_a_peer_waits_for_its_certificate_until_a_slow_database_has_used_its_token() -> None:
    token_s = commit_s = STATEMENT_TIMEOUT_S
    assert BODY_TIMEOUT_S + token_s + commit_s < JOIN_TIMEOUT_S


AGENT = Identity(
    name="ams-1",
    role=PeerRole.AGENT,
    pop=PopId("ams"),
    cluster_id=ClusterId("c"),
    key_pem="",
    certificate_pem="",
    ca_pem="",
)


async def test_the_identity_of_another_kind_of_service_is_refused(tmp_path: Path) -> None:
    save_identity(tmp_path, AGENT)
    words = r"identity\.json is the identity of agent ams-1, and this is no agent: give"
    with pytest.raises(ConfigError, match=words):
        await load_or_join(
            urls=[], token_file=None, role=PeerRole.ROUTER, name="ams-1", folder=tmp_path
        )


@pytest.mark.parametrize(("name", "warnings"), [("ams-1", 0), ("sin-1", 1)])
async def test_an_identity_copied_from_another_server_is_named(
    name: str, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_identity(tmp_path, AGENT)
    with caplog.at_level(logging.WARNING):
        identity = await load_or_join(
            urls=[], token_file=None, role=PeerRole.AGENT, name=name, folder=tmp_path
        )
    assert identity == AGENT
    assert len(caplog.records) == warnings
    for record in caplog.records:
        reason = record.__dict__["fields"]["reason"]
        assert reason.startswith("going on as ams-1 in ams")
        assert "`isochrone nodes join-token POP --name sin-1`" in reason


async def test_a_damaged_identity_says_how_to_get_another(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match="restore the file, or delete it and join again"):
        await load_or_join(
            urls=[], token_file=None, role=PeerRole.AGENT, name="ams-1", folder=tmp_path
        )
