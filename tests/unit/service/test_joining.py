"""A peer without an identity of its own says what to do."""

import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from isochrone.service.config import ConfigError
from isochrone.service.trust import identity as papers
from isochrone.service.trust.identity import Authority, Identity, save_identity
from isochrone.service.trust.joining import JOIN_TIMEOUT_S, load_or_join
from isochrone.wire.ids import ClusterId, PopId
from isochrone.wire.peers.control import PeerRole, join_token_command
from scheduler.api.control.join import BODY_TIMEOUT_S
from scheduler.store.pool import STATEMENT_TIMEOUT_S

NOW = datetime.now(UTC)


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


def an_agent(folder: Path) -> Identity:
    authority = Authority.create(folder / "authority", "test", NOW)
    key_pem, pop = papers.new_key_pem(), PopId("ams")
    certificate_pem = authority.issue(
        papers.make_csr(key_pem, "ams-1"), role=PeerRole.AGENT, name="ams-1", pop=pop, now=NOW
    )
    return Identity(
        name="ams-1",
        role=PeerRole.AGENT,
        pop=pop,
        cluster_id=ClusterId("c"),
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=authority.ca_pem,
    )


async def test_the_identity_of_another_kind_of_service_is_refused(tmp_path: Path) -> None:
    save_identity(tmp_path, an_agent(tmp_path))
    words = r"identity\.json is the identity of agent ams-1, and this is no agent: give"
    with pytest.raises(ConfigError, match=words):
        await load_or_join(
            urls=[], token_file=None, role=PeerRole.ROUTER, name="ams-1", folder=tmp_path
        )


@pytest.mark.parametrize(("name", "warnings"), [("ams-1", 0), ("sin-1", 1)])
async def test_an_identity_copied_from_another_server_is_named(
    name: str, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = an_agent(tmp_path)
    save_identity(tmp_path, agent)
    with caplog.at_level(logging.WARNING):
        identity = await load_or_join(
            urls=[], token_file=None, role=PeerRole.AGENT, name=name, folder=tmp_path
        )
    assert identity == agent
    assert len(caplog.records) == warnings
    for record in caplog.records:
        reason = record.__dict__["fields"]["reason"]
        assert reason.startswith("going on as ams-1 in ams")
        assert "`isochrone nodes join-token POP --name sin-1`" in reason


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "truncated"),
        (("key_pem",), "the certificate was issued for another key"),
        (("key_pem", "certificate_pem"), "another authority issued the certificate"),
        (("ca_pem",), "another authority issued the certificate"),
    ],
)
async def test_a_damaged_or_mixed_identity_says_how_to_get_another(
    parts: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    """The parts of another server's files were copied over those of this one."""
    own, other = an_agent(tmp_path / "own"), an_agent(tmp_path / "other")
    mixed = replace(own, **{part: getattr(other, part) for part in parts})
    save_identity(tmp_path, mixed)
    if not parts:
        (tmp_path / "identity.json").write_bytes(b"{")
    words = f"cannot use .*{reason}.*restore the file, or delete it and join again"
    with pytest.raises(ConfigError, match=words):
        await load_or_join(
            urls=[], token_file=None, role=PeerRole.AGENT, name="ams-1", folder=tmp_path
        )


@pytest.mark.parametrize("part", ["key_pem", "certificate_pem", "ca_pem"])
async def test_an_identity_with_an_unreadable_part_says_how_to_get_another(
    part: str, tmp_path: Path
) -> None:
    save_identity(tmp_path, replace(an_agent(tmp_path), **{part: "-----BEGIN"}))
    with pytest.raises(ConfigError, match="restore the file, or delete it and join again"):
        await load_or_join(
            urls=[], token_file=None, role=PeerRole.AGENT, name="ams-1", folder=tmp_path
        )
