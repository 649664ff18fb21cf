"""Ranks on several nodes: how workers on other nodes find rank 0 and prove that they belong to it.

Rule 1: each worker opens two connections to rank 0: one for commands, and one on which nothing is
sent. When that one closes, the process on the other side has ended.
Rule 2: both sides prove that they know the group's secret, which itself is not sent. Everything
later is sent in plaintext, as gloo and nccl do: the network between the nodes must be trusted.
Rule 3: rank 0 waits for all workers before anything is loaded. A worker that ends meanwhile may
connect again; one that ends later ends the group, and the agent of each node starts it again.
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

from isochrone.wire.peers.assignment import ReplicaGroup
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.workers.worker_group import (
    CommandChannel,
    WorkerHandle,
    WorkerLost,
    has_ended,
)

log = logging.getLogger(__name__)

_NONCE_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"!H?{_NONCE_BYTES}s{sha256().digest_size}s")
"""The rank, whether this is its liveness connection, its nonce, and its proof."""

_HANDSHAKE_S: Final = 2.0
"""The time for the whole handshake: rank 0 makes them one after the other."""
_ACCEPT_S: Final = 0.5
_RETRY_S: Final = 0.25
"""Between attempts while rank 0 does not listen yet."""
_RETRY_REJECTED_S: Final = 2.0
_BACKLOG: Final = 128
_KEEPALIVE_IDLE_S: Final = 5
_KEEPALIVE_INTERVAL_S: Final = 3
_KEEPALIVE_PROBES: Final = 3
"""A node that is gone is noticed after idle + interval * probes seconds."""


class WorkerConnections(NamedTuple):
    """The two connections between a worker and rank 0."""

    commands: socket.socket
    liveness: socket.socket

    def close(self) -> None:
        """Close both."""
        self.commands.close()
        self.liveness.close()


class _Connection(NamedTuple):
    """One of the two connections that a worker opens."""

    rank: int
    is_liveness: bool


class WorkerRendezvous:
    """The side of rank 0: listens until all workers of other nodes have connected."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        try:
            self._listener = socket.create_server(
                _address(group), family=_family(group), backlog=_BACKLOG
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot meet other nodes at {group.host}:{group.port}: {error.strerror or error}"
            ) from error
        self._listener.settimeout(_ACCEPT_S)

    def wait(self, ranks: range, timeout_s: float) -> list[WorkerHandle]:
        """Wait for every worker of `ranks`; raises CheckpointError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        opened: dict[_Connection, socket.socket] = {}
        complete: dict[int, WorkerConnections] = {}
        while len(complete) < len(ranks):
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in ranks if rank not in complete)
                raise CheckpointError(
                    f"cannot begin: of the ranks on other nodes {missing} did not connect to "
                    f"{self._group.host}:{self._group.port} within {timeout_s:g} s"
                )
            self._accept(opened, ranks)
            for rank in ranks:
                commands, liveness = _Connection(rank, False), _Connection(rank, True)
                if commands in opened and liveness in opened:
                    if rank in complete:
                        complete[rank].close()
                    complete[rank] = WorkerConnections(opened.pop(commands), opened.pop(liveness))
                if rank in complete and has_ended(complete[rank].liveness.fileno()):
                    log.info("rank %d left before all ranks had connected", rank)
                    complete.pop(rank).close()
        return [
            WorkerHandle(
                rank, 0, connections.liveness.detach(), CommandChannel(connections.commands)
            )
            for rank, connections in sorted(complete.items())
        ]

    def open_store(self, ranks: int, timeout_s: float) -> Store:
        """Serve the store through which torch connects all `ranks`, at the same address."""
        return open_store(self._group, ranks, timeout_s, self._listener.detach())

    def _accept(self, opened: dict[_Connection, socket.socket], ranks: range) -> None:
        """Accept and authenticate a connection, if one arrives soon, and add it to `opened`."""
        try:
            connection, address = self._listener.accept()
        except TimeoutError:
            return
        until_s = time.monotonic() + _HANDSHAKE_S
        try:
            connection.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(nonce)
            hello = _receive(connection, _HELLO.size, until_s)
            rank, is_liveness, worker_nonce, proof = _HELLO.unpack(hello)
            expected = _proof(self._group, b"rank", nonce, hello[: -len(proof)])
            if rank not in ranks or not hmac.compare_digest(proof, expected):
                raise ConnectionError("it does not know the group's secret")
            connection.sendall(_proof(self._group, b"front", worker_nonce))
        except OSError as error:
            log.warning("rejected %s: %s", address[0], error)
            connection.close()
            return
        _keep_alive(connection)
        earlier = opened.pop(_Connection(rank, is_liveness), None)
        if earlier is not None:
            earlier.close()
        opened[_Connection(rank, is_liveness)] = connection


def dial_rank0(group: ReplicaGroup, rank: int, timeout_s: float) -> WorkerConnections:
    """Connect to rank 0 as `rank`, retrying until it listens; raises WorkerLost after a time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            liveness = _dial(group, rank, is_liveness=True)
            try:
                return WorkerConnections(_dial(group, rank, is_liveness=False), liveness)
            except OSError:
                liveness.close()
                raise
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"cannot reach the leader at {group.host}:{group.port} within {timeout_s:g} s: "
                    f"{error}"
                ) from error
            is_refused = isinstance(error, ConnectionRefusedError)
        time.sleep(_RETRY_S if is_refused else _RETRY_REJECTED_S)


def open_store(
    group: ReplicaGroup, ranks: int, timeout_s: float, listener: int | None = None
) -> Store:
    """Return the store through which torch connects all `ranks`.

    Rank 0 serves it on the descriptor `listener`; the others connect to it.
    """
    _use_interface(group)
    return TCPStore(
        group.host,
        group.port,
        ranks,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _dial(group: ReplicaGroup, rank: int, *, is_liveness: bool) -> socket.socket:
    """Open one connection to rank 0, and prove to each other that both know the secret."""
    until_s = time.monotonic() + _HANDSHAKE_S
    connection = socket.create_connection(_address(group), _HANDSHAKE_S)
    try:
        nonce = _receive(connection, _NONCE_BYTES, until_s)
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _HELLO.pack(rank, is_liveness, own_nonce, b"")[: -sha256().digest_size]
        connection.sendall(hello + _proof(group, b"rank", nonce, hello))
        proof = _receive(connection, sha256().digest_size, until_s)
        if not hmac.compare_digest(proof, _proof(group, b"front", own_nonce)):
            raise ConnectionError("the listener does not know the group's secret")
    except OSError:
        connection.close()
        raise
    _keep_alive(connection)
    return connection


def _proof(group: ReplicaGroup, *parts: bytes) -> bytes:
    return hmac.digest(group.secret.encode(), b"\0".join(parts), sha256)


def _receive(connection: socket.socket, size: int, until_s: float) -> bytes:
    """Return `size` bytes. Raises OSError if they have not all come by `until_s` (monotonic)."""
    content = b""
    while len(content) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it took longer than {_HANDSHAKE_S:g} s")
        connection.settimeout(left_s)
        received = connection.recv(size - len(content))
        if not received:
            raise ConnectionError("it closed the connection")
        content += received
    return content


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    # The same limit for data that was sent and is not acknowledged.
    unacknowledged_ms = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unacknowledged_ms)


def _address(group: ReplicaGroup) -> tuple[str, int]:
    return group.host, group.port


def _family(group: ReplicaGroup) -> socket.AddressFamily:
    with suppress(socket.gaierror):
        return socket.getaddrinfo(*_address(group), type=socket.SOCK_STREAM)[0][0]
    return socket.AF_INET


def _use_interface(group: ReplicaGroup) -> None:
    """Have gloo and nccl use the network interface through which the leader is reached."""
    with socket.socket(_family(group), socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only selects a route.
        probe.connect(_address(group))
        local_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == local_address for known in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
