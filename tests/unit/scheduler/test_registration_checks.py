"""A peer registers with its own certificate, its own key and for itself alone."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from isochrone.service.trust import identity as papers
from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, PopId
from isochrone.wire.peers.control import PeerRole, RefusedCode, Register, register_payload
from scheduler.api.control import peers
from scheduler.api.control.certificates import CertificateIssuer
from scheduler.api.control.peer_frames import PeerRefused
from scheduler.api.control.peers import PeerServer

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NONCE = b"n" * 32
CLUSTER = ClusterId("c1")
KEY = papers.new_key_pem()


class Bench:
    """The scheduler of one cluster, and what its authority and another one issue."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.theirs = (
            Authority.create(folder / name, name, NOW - timedelta(days=400))
            for name in ("ours", "theirs")
        )
        unused = cast(Any, None)
        self.server = PeerServer(
            intake=unused,
            reserved=unused,
            cluster_id=CLUSTER,
            issuer=CertificateIssuer(self.ours, lifetime_s=1.0),
            lease=cast(Any, SimpleNamespace(clock=None)),
            leadership=unused,
            peers=unused,
            admission=unused,
            unregistered=unused,
        )

    def registration(
        self,
        *,
        authority: Authority | None = None,
        issued: datetime = NOW,
        nonce: bytes = NONCE,
        cluster: ClusterId = CLUSTER,
        boot: str = "b1",
        key: str = KEY,
        certified: tuple[PeerRole, str, str] = (PeerRole.AGENT, "n1", "ams"),
        **said: Any,
    ) -> Register:
        """Return a registration as n1; `said` are the fields in which it differs."""
        role, name, pop = certified
        certificate_pem = (authority or self.ours).issue(
            papers.make_csr(KEY, name), role=role, name=name, pop=PopId(pop), now=issued
        )
        payload = register_payload(cluster_id=cluster, nonce=nonce, name="n1", boot_id=BootId(boot))
        register = Register(
            protocol=1,
            role=PeerRole.AGENT,
            name="n1",
            pop=PopId("ams"),
            boot_id=BootId("b1"),
            certificate_pem=certificate_pem,
            signature=papers.sign(key, payload),
            cluster_id=CLUSTER,
            generation=Generation(0),
            epoch=Epoch(0),
        )
        return msgspec.structs.replace(register, **said)

    def answer(self, register: Register, role: PeerRole = PeerRole.AGENT) -> str:
        """Return the name that was registered, or why none was."""
        try:
            return self.server._verify(register, role, NONCE).subject.name
        except PeerRefused as refusal:
            return refusal.refused.code


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(peers, "utc_now", lambda: NOW)
    return Bench(tmp_path)


Make = Callable[[Bench], Register]

LIES: dict[str, Make] = {
    "of another cluster": lambda b: b.registration(authority=b.theirs),
    "for the cluster beside": lambda b: b.registration(cluster=ClusterId("c2")),
    "another node's name": lambda b: b.registration(certified=(PeerRole.AGENT, "n2", "ams")),
    "another pop": lambda b: b.registration(certified=(PeerRole.AGENT, "n1", "iad")),
    "a router's": lambda b: b.registration(certified=(PeerRole.ROUTER, "n1", "ams")),
    "a router's for a router": lambda b: b.registration(
        certified=(PeerRole.ROUTER, "n1", "ams"), role=PeerRole.ROUTER
    ),
    "a replayed signature": lambda b: b.registration(nonce=b"m" * 32),
    "of another boot": lambda b: b.registration(boot="b2"),
    "without its key": lambda b: b.registration(key=papers.new_key_pem()),
    "no signature": lambda b: b.registration(signature=b""),
    "no certificate": lambda b: b.registration(certificate_pem=""),
    "a scheduler's": lambda b: b.registration(
        certificate_pem=b.ours.issue_scheduler_certificate(NOW)[1]
    ),
    "the authority's": lambda b: b.registration(certificate_pem=b.ours.ca_pem),
    "expired": lambda b: b.registration(issued=NOW - timedelta(days=90, minutes=6)),
    "of the future": lambda b: b.registration(issued=NOW + timedelta(days=1, minutes=11)),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_node_registers_as_anything_else(bench: Bench, lie: str) -> None:
    assert bench.answer(LIES[lie](bench)) == RefusedCode.IDENTITY


def test_a_node_registers_as_a_node_while_clocks_differ(bench: Bench) -> None:
    for issued in (NOW, NOW + timedelta(days=1, minutes=10), NOW - timedelta(days=90, minutes=4)):
        assert bench.answer(bench.registration(issued=issued)) == "n1"
    assert bench.answer(bench.registration(), PeerRole.ROUTER) == RefusedCode.IDENTITY


@pytest.mark.parametrize("release", ["0.1.0\0", "é", "9" * 129])
def test_a_release_that_the_store_could_not_keep_is_refused(bench: Bench, release: str) -> None:
    message = msgspec.msgpack.encode(bench.registration(version=release))
    with pytest.raises(msgspec.ValidationError, match="version"):
        msgspec.msgpack.decode(message, type=Register)
