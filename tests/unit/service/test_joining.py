"""A peer without an identity says how to make a token for it."""

from pathlib import Path

import pytest

from isochrone.service.config import ConfigError
from isochrone.service.trust.joining import JOIN_TIMEOUT_S, load_or_join
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
