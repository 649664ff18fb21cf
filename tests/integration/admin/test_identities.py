"""Names, tokens and certificates: revocation is permanent, and valid certificates are renewed."""

import asyncio
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from isochrone.service.trust import tls
from isochrone.service.trust.identity import (
    Identity,
    IdentityError,
    is_for_key,
    load_identity,
    read_certificate,
)
from isochrone.service.trust.joining import join
from isochrone.wire.peers.control import JoinRequest, PeerRole
from scheduler.api.control import join as join_route
from tests.builders import a_report
from tests.faults import Faults
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_cli import run_cli
from tests.integration.admin.test_control import Agent, dialling, joined
from tests.system.harness import until

SHORT_LIFE_S = 3.0
PLACE = ("--city", "Frankfurt", "--country", "DE", "--latitude", "50", "--longitude", "8")


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    if "renews_itself" in request.node.name:
        return {"certificate_lifetime_s": SHORT_LIFE_S}
    if "dials_at_once" in request.node.name:
        return {"admissions_per_s": 10.0}
    return {}


async def a_token(admin: Admin, **fields: Any) -> str:
    made = await admin.ask("POST", "/v1/join-tokens", {"pop": "ams", **fields})
    assert made.status == 201
    return str(made.body["token"])


async def joining(
    admin: Admin, folder: Path, token: str, name: str = "n1", role: PeerRole = PeerRole.AGENT
) -> Identity:
    return await join(urls=[admin.control_url], token=token, role=role, name=name, folder=folder)


async def refusal_of(admin: Admin, identity: Identity, boot: str) -> str:
    """Connect once; return the refusal, or "" if the peer is registered."""
    async with dialling(Agent(admin, identity, boot)) as agent:

        async def is_answered() -> bool:
            return bool(agent.welcomes or agent.link.last_refusal)

        await until("an answer", is_answered, 10.0)
        return "" if agent.welcomes else agent.link.last_refusal


def serial_of(identity: Identity) -> str:
    return read_certificate(identity.certificate_pem).serial


async def test_joining_again_under_a_revoked_name_does_not_clear_the_revocation(
    admin: Admin, tmp_path: Path
) -> None:
    old = await joined(admin, tmp_path / "old")
    early = await a_token(admin, name="n1")
    assert (await admin.ask("POST", "/v1/nodes/n1/revoke")).status == 200
    for token in (early, await a_token(admin)):
        with pytest.raises(IdentityError, match=r"n1 is revoked; .*`isochrone nodes readmit n1`"):
            await joining(admin, tmp_path / "new", token)
    assert (await admin.ask("GET", "/v1/nodes/n1")).body["revoked"]
    # After readmission it joins with a new certificate; the old one stays revoked.
    assert (await admin.ask("POST", "/v1/nodes/n1/readmit")).status == 200
    new = await joining(admin, tmp_path / "new", await a_token(admin, name="n1"))
    assert await refusal_of(admin, new, "boot-2") == ""
    assert "revoked" in await refusal_of(admin, old, "boot-1")
    kinds = [event["kind"] for event in (await admin.ask("GET", "/v1/events")).body["data"]]
    assert kinds[:3] == ["agent.joined", "join_token.create", "node.readmit"]


async def test_a_deleted_name_that_joins_again_does_not_revive_old_certificates(
    admin: Admin, tmp_path: Path
) -> None:
    old = await joined(admin, tmp_path / "old")
    assert (await admin.ask("DELETE", "/v1/nodes/n1")).status == 204
    new = await joining(admin, tmp_path / "new", await a_token(admin))
    assert "revoked" in await refusal_of(admin, old, "boot-1")
    assert await refusal_of(admin, new, "boot-2") == ""


async def test_one_certificate_is_revoked_by_its_serial_and_the_name_stays_valid(
    admin: Admin, tmp_path: Path
) -> None:
    stolen = await joined(admin, tmp_path / "a")
    async with dialling(Agent(admin, stolen, "boot-1")) as thief:
        await until("welcome", thief.is_welcome)
        shown = (await admin.ask("GET", "/v1/nodes/n1")).body
        assert shown["certificate_serial"] == serial_of(stolen)
        body = {"role": "agent", "name": "n1", "serial": "ab12", "reason": "stolen"}
        mistyped = await admin.ask("POST", "/v1/revocations", body)
        assert mistyped.status == 404
        assert serial_of(stolen) in mistyped.body["error"]["message"]
        # As OpenSSL prints it.
        body["serial"] = f"0{serial_of(stolen).upper()}"[-40:]
        assert (await admin.ask("POST", "/v1/revocations", body)).status == 201
        await until("the conversation is cut", thief.is_refused, 5.0)
        assert "revoked" in thief.link.last_refusal
    assert not (await admin.ask("GET", "/v1/nodes/n1")).body["revoked"]
    listed = (await admin.ask("GET", "/v1/revocations")).body["data"]
    assert [row["reason"] for row in listed] == ["stolen"]
    owner = await joining(admin, tmp_path / "b", await a_token(admin, name="n1"))
    assert await refusal_of(admin, owner, "boot-2") == ""


async def test_a_token_is_bound_to_its_name_and_counts_its_uses(
    admin: Admin, tmp_path: Path
) -> None:
    await admin.pop()
    bound = await a_token(admin, name="n1")
    with pytest.raises(IdentityError, match="for another role or name"):
        await joining(admin, tmp_path / "x", bound, "n2")
    first = await joining(admin, tmp_path / "n1", bound)
    assert await refusal_of(admin, first, "boot-1") == ""
    # A name that has been in use needs a token bound to it.
    thrice = await a_token(admin, uses_max=3)
    with pytest.raises(IdentityError, match="the name n1 is in use"):
        await joining(admin, tmp_path / "y", thrice)
    # A router needs a token of its own kind, which the message says how to make.
    command = "`isochrone nodes join-token POP --role router`"
    with pytest.raises(IdentityError, match=command):
        await joining(admin, tmp_path / "r", thrice, "r1", PeerRole.ROUTER)
    for name in ("n2", "n3", "n4"):
        await joining(admin, tmp_path / name, thrice, name)
    with pytest.raises(IdentityError, match="used, expired"):
        await joining(admin, tmp_path / "n5", thrice, "n5")
    tokens = (await admin.ask("GET", "/v1/join-tokens")).body["data"]
    assert {(token["name"], token["uses"], token["uses_max"]) for token in tokens} == {
        ("n1", 1, 1),
        (None, 3, 3),
    }


async def test_no_token_is_made_for_a_name_that_would_be_refused(
    admin: Admin, tmp_path: Path
) -> None:
    await joined(admin, tmp_path)
    assert (await run_cli(admin, "pops", "add", "fra", *PLACE))[0] == 0
    code, out, err = await run_cli(admin, "nodes", "join-token", "fra", "--name", "n1")
    assert (code, out) == (1, "")
    assert "n1 is in another PoP, ams; to move it, delete it there first (`isochrone nodes" in err
    assert (await run_cli(admin, "nodes", "join-token", "ams", "--name", "n1"))[0] == 0
    router = ("--name", "n1", "--role", "router")
    assert (await run_cli(admin, "nodes", "join-token", "fra", *router))[0] == 0
    assert (await admin.ask("POST", "/v1/nodes/n1/revoke")).status == 200
    refused = await admin.ask("POST", "/v1/join-tokens", {"pop": "ams", "name": "n1"})
    assert refused.status == 409
    assert "`isochrone nodes readmit n1`" in refused.body["error"]["message"]
    assert len((await admin.ask("GET", "/v1/join-tokens")).body["data"]) == 3, "none of a refusal"


async def test_a_certificate_renews_itself_and_its_subject_stays_the_same(
    admin: Admin, tmp_path: Path
) -> None:
    first = await joined(admin, tmp_path)
    async with dialling(Agent(admin, first, "boot-1", folder=tmp_path)) as agent:

        async def is_renewed_twice() -> bool:
            kept = load_identity(tmp_path)
            assert kept is not None
            seen.add(serial_of(kept))
            return len(seen) >= 3

        seen = {serial_of(first)}
        await until("renewed twice", is_renewed_twice, 4 * SHORT_LIFE_S)
        assert len(agent.welcomes) == 1, "renewed within one conversation"
    kept = load_identity(tmp_path)
    assert kept is not None
    assert (kept.name, kept.role, kept.pop, kept.ca_pem) == (
        first.name, first.role, first.pop, first.ca_pem,
    )  # fmt: skip
    assert kept.key_pem != first.key_pem
    assert is_for_key(kept.certificate_pem, kept.key_pem)
    # Raises if the certificate does not match the key.
    tls.reload_identity(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), kept)
    assert await refusal_of(admin, kept, "boot-2") == ""


async def test_a_revoked_peer_is_disconnected_before_it_renews(
    admin: Admin, tmp_path: Path
) -> None:
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "boot-1", folder=tmp_path)) as agent:
        await until("welcome", agent.is_welcome)
        assert (await admin.ask("POST", "/v1/nodes/n1/revoke")).status == 200
        await until("cut", agent.is_refused, 5.0)
    assert load_identity(tmp_path) == identity
    events = (await admin.ask("GET", "/v1/events")).body["data"]
    assert "agent.renewed" not in {event["kind"] for event in events}


async def test_nodes_are_sent_the_revocations_they_enforce(admin: Admin, tmp_path: Path) -> None:
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "boot-1")) as agent:
        await until("welcome", agent.is_welcome)
        assert await agent.link.send(a_report("n1", 1))

        async def is_told() -> bool:
            return bool(agent.assignments)

        await until("an assignment", is_told)
        assert agent.assignments[0].revoked == ()
        body = {"role": "router", "name": "r9", "serial": "ab12", "may_be_unknown": True}
        assert (await admin.ask("POST", "/v1/revocations", body)).status == 201

        async def is_warned() -> bool:
            return bool(agent.assignments[-1].revoked)

        await until("the revocation", is_warned, 5.0)
        (told,) = agent.assignments[-1].revoked
        assert (told.role, told.name, told.serial) == ("router", "r9", "ab12")


async def busy_refusals(admin: Admin) -> list[str]:
    """Return the metric of peers that were refused as too many; other tests count there, too."""
    page = (await admin.ask("GET", "/metrics")).body
    return [line for line in page.splitlines() if 'refused_peers_total{code="busy"}' in line]


async def test_a_fleet_that_dials_at_once_is_admitted_at_the_configured_rate(
    admin: Admin, tmp_path: Path
) -> None:
    await admin.pop()
    token = await a_token(admin, uses_max=20)
    refused_before = await busy_refusals(admin)
    agents = [
        Agent(admin, await joining(admin, tmp_path / f"n{i}", token, f"n{i}"), f"boot-{i}")
        for i in range(20)
    ]
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with AsyncExitStack() as stack:
        for agent in agents:
            await stack.enter_async_context(dialling(agent))

        async def all_are_in() -> bool:
            return all(agent.welcomes for agent in agents)

        await until("all are in", all_are_in, 30.0)
        # Half a second's worth is admitted at once, the others at ten a second.
        assert loop.time() - began > 1.0
        assert await busy_refusals(admin) == refused_before
        # The first peer registers before any other is known.
        assert max(agent.welcomes[0].redial_spread_s for agent in agents) > 0


async def test_clients_without_a_token_cannot_keep_the_database_busy(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_dsn: str
) -> None:
    # Ten at once and then two a second, however long a hundred requests take.
    monkeypatch.setattr(join_route, "JOINS_PER_S", 2.0)
    monkeypatch.setattr(join_route, "BURST_S", 5.0)
    await admin.pop()
    token = await a_token(admin)
    faults = Faults(monkeypatch, database_dsn)
    wrong = JoinRequest(
        token=f"{token[:-43]}{'x' * 43}", role=PeerRole.AGENT, name="n9", csr_pem="x"
    )
    statuses = []
    async with aiohttp.ClientSession() as http:
        for _ in range(100):
            url = f"{admin.control_url}/v1/join"
            async with http.post(url, data=msgspec.json.encode(wrong)) as response:
                statuses.append(response.status)
    assert set(statuses) == {403, 429}
    assert (
        sum("join_token" in statement for statement in faults.statements)
        == statuses.count(403)
        < 50
    )

    async def has_joined() -> bool:
        with suppress(IdentityError):
            return (await joining(admin, tmp_path / "n1", token)).name == "n1"
        return False

    await until("the next one joins", has_joined)


async def test_nothing_joins_with_a_token_that_was_deleted(admin: Admin, tmp_path: Path) -> None:
    await admin.pop()
    made = ("nodes", "join-token", "ams", "--uses", "2", "--ttl", "30d")
    token = (await run_cli(admin, *made))[1].strip()
    token_id = token.split("_")[2]
    assert token_id in (await run_cli(admin, "nodes", "join-tokens"))[1]
    delete = ("nodes", "delete-join-token", token_id)
    assert (await run_cli(admin, *delete))[::2] == (0, f"deleted {token_id}\n")
    with pytest.raises(
        IdentityError, match=r"^cannot join: http\S+ the token is unknown, used, expired"
    ):
        await joining(admin, tmp_path, token)
    code, _, err = await run_cli(admin, *delete)
    assert (code, "`isochrone nodes join-tokens` shows all" in err) == (1, True)
