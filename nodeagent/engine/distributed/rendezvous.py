"""Ranks on several machines: how those elsewhere find the front, and prove that they are of it.

Rule 1: each dials the front twice: for what it is told, and for a line on which nothing is ever
said, whose end is the end of the other side.
Rule 2: both sides prove that they know the group's secret, which itself is not sent. All that is
said later is in plain, as gloo and nccl speak: the network between the nodes must be their own.
Rule 3: the front waits for all before anything is loaded. Who ends meanwhile may come again; who
ends later ends the group, and each node's agent begins it anew.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Final, NamedTuple

import psutil
from torch._C._distributed_c10d import Store, TCPStore

from isochrone.wire.assignment import Group
from nodeagent.engine.distributed.worker_group import Channel, Member, RankLost, has_ended
from nodeagent.engine.model.shape import CheckpointError

log = logging.getLogger(__name__)

_NONCE_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"!H?{_NONCE_BYTES}s{sha256().digest_size}s")
"""Which rank dials, whether for its line, its nonce, and its proof."""

_HANDSHAKE_S: Final = 2.0
_LOOK_S: Final = 0.5
_AGAIN_S: Final = 0.25
_TURNED_AWAY_S: Final = 2.0
_BACKLOG: Final = 128
_SILENT_S: Final = 5
_PROBE_S: Final = 3
_PROBES: Final = 3
"""A machine that is gone is noticed after _SILENT_S + _PROBE_S * _PROBES seconds."""


class Lines(NamedTuple):
    """What one rank and the front have of one another."""

    orders: socket.socket
    life: socket.socket

    def close(self) -> None:
        """Let go of both."""
        self.orders.close()
        self.life.close()


class Gathering:
    """The front's side: it listens where all meet, until they have."""

    def __init__(self, group: Group) -> None:
        self._group = group
        try:
            self._listener = socket.create_server(
                _address(group), family=_family(group), backlog=_BACKLOG
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot meet other nodes at {group.host}:{group.port}: {error.strerror or error}"
            ) from error
        self._listener.settimeout(_LOOK_S)

    def wait(self, ranks: range, timeout_s: float) -> list[Member]:
        """Take in every rank of `ranks`; raises CheckpointError where not all come in time."""
        deadline = time.monotonic() + timeout_s
        half: dict[tuple[int, bool], socket.socket] = {}
        come: dict[int, Lines] = {}
        while len(come) < len(ranks):
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in ranks if rank not in come)
                raise CheckpointError(
                    f"cannot begin: of the ranks on other nodes {missing} did not come to "
                    f"{self._group.host}:{self._group.port} within {timeout_s:g} s"
                )
            self._take(half, ranks)
            for rank in ranks:
                if (rank, True) in half and (rank, False) in half:
                    if rank in come:
                        come[rank].close()
                    come[rank] = Lines(half.pop((rank, False)), half.pop((rank, True)))
                if rank in come and has_ended(come[rank].life.fileno()):
                    log.info("rank %d left before all had come", rank)
                    come.pop(rank).close()
        return [
            Member(rank, 0, lines.life.detach(), Channel(lines.orders))
            for rank, lines in sorted(come.items())
        ]

    def store(self, world: int, timeout_s: float) -> Store:
        """Keep the store by which torch has all ranks meet, at the same place."""
        return store_of(self._group, world, timeout_s, self._listener.detach())

    def _take(self, half: dict[tuple[int, bool], socket.socket], ranks: range) -> None:
        try:
            dialled, address = self._listener.accept()
        except TimeoutError:
            return
        try:
            dialled.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            dialled.sendall(nonce)
            hello = _read(dialled, _HELLO.size)
            rank, is_life, theirs, proof = _HELLO.unpack(hello)
            expected = _proof(self._group, b"rank", nonce, hello[: -len(proof)])
            if rank not in ranks or not hmac.compare_digest(proof, expected):
                raise ConnectionError("it does not know the group's secret")
            dialled.sendall(_proof(self._group, b"front", theirs))
        except OSError as error:
            log.warning("turned away %s: %s", address[0], error)
            dialled.close()
            return
        _keep_alive(dialled)
        before = half.pop((rank, is_life), None)
        if before is not None:
            before.close()
        half[rank, is_life] = dialled


def dial(group: Group, rank: int, timeout_s: float) -> Lines:
    """Reach the front as `rank`, trying again until it listens; raises RankLost after a time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            life = _dial(group, rank, is_life=True)
            try:
                return Lines(_dial(group, rank, is_life=False), life)
            except OSError:
                life.close()
                raise
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLost(
                    f"cannot reach the leader at {group.host}:{group.port} within {timeout_s:g} s: "
                    f"{error}"
                ) from error
            refused = isinstance(error, ConnectionRefusedError)
        time.sleep(_AGAIN_S if refused else _TURNED_AWAY_S)


def store_of(group: Group, world: int, timeout_s: float, listener: int | None = None) -> Store:
    """Return the store by which torch has all ranks meet; the front keeps it at its `listener`."""
    _use_interface(group)
    return TCPStore(
        group.host,
        group.port,
        world,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _dial(group: Group, rank: int, *, is_life: bool) -> socket.socket:
    dialled = socket.create_connection(_address(group), _HANDSHAKE_S)
    try:
        nonce = _read(dialled, _NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        said = _HELLO.pack(rank, is_life, mine, b"")[: -sha256().digest_size]
        dialled.sendall(said + _proof(group, b"rank", nonce, said))
        if not hmac.compare_digest(
            _read(dialled, sha256().digest_size), _proof(group, b"front", mine)
        ):
            raise ConnectionError("who listens there does not know the group's secret")
    except OSError:
        dialled.close()
        raise
    _keep_alive(dialled)
    return dialled


def _proof(group: Group, *said: bytes) -> bytes:
    return hmac.digest(group.secret.encode(), b"\0".join(said), sha256)


def _read(dialled: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = dialled.recv(size - len(content))
        if not more:
            raise ConnectionError("it hung up")
        content += more
    return content


def _keep_alive(dialled: socket.socket) -> None:
    dialled.settimeout(None)
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    dialled.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # The same bound for what was said and is not acknowledged.
    unheard_ms = 1000 * (_SILENT_S + _PROBE_S * _PROBES)
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)


def _address(group: Group) -> tuple[str, int]:
    return group.host, group.port


def _family(group: Group) -> socket.AddressFamily:
    with suppress(socket.gaierror):
        return socket.getaddrinfo(*_address(group), type=socket.SOCK_STREAM)[0][0]
    return socket.AF_INET


def _use_interface(group: Group) -> None:
    """Have gloo and nccl meet on the interface by which the leader is reached."""
    with socket.socket(_family(group), socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only chooses a way.
        probe.connect(_address(group))
        address = probe.getsockname()[0]
    for name, known in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in known):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
