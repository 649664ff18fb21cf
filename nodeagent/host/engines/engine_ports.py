"""Ports of engines: on loopback one engine each, checked once it listens. Connections to others.

Several engines let other processes of the same user listen on their port (SO_REUSEPORT), and the
kernel then gives each of them a part of the connections. An engine that is given a port may need
half a minute until it listens there.
"""

import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from nodeagent.host.processes import group_members

ESTABLISHED: Final = "01"
LISTENING: Final = "0A"
LOCAL_ADDRESSES: Final = ("0100007F", "00000000")
"""127.0.0.1 and 0.0.0.0, as /proc/net/tcp writes them (proc_pid_net(5))."""

TRIES_MAX: Final = 100


def free_port(taken: Collection[int]) -> int:
    """Return a port on which nothing listens, and that is not among `taken`. Raises OSError."""
    for _ in range(TRIES_MAX):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
    raise OSError(f"cannot find a port for an engine: {len(taken)} are taken by others")


def other_listener(port: int, group: int) -> str:
    """Return which process outside a process group listens on a port, "" if none does. Blocks."""
    listeners = _listening_sockets(port)
    if not listeners:
        return ""
    strangers = listeners - _sockets_of(group_members(group))
    if not strangers:
        return ""
    for folder in Path("/proc").glob("[0-9]*"):
        if strangers & _sockets_of([int(folder.name)]):
            with suppress(OSError):
                name = (folder / "comm").read_text(errors="replace").strip()
                return f"process {folder.name} ({name})"
    return "a process of another user"


def _listening_sockets(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a local port."""
    found = set()
    with suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == LISTENING and address in LOCAL_ADDRESSES and int(number, 16) == port:
                found.add(fields[9])
    return found


def is_connected_to(port: int, group: int) -> bool:
    """Return whether a process of a group has an open connection to a port of any host. Blocks."""
    connections = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED and int(fields[2].rpartition(":")[2], 16) == port:
                    connections.add(fields[9])
    return bool(connections and connections & _sockets_of(group_members(group)))


def _sockets_of(pids: Collection[int]) -> set[str]:
    """Return the inodes of the sockets that processes have open."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
    return found
