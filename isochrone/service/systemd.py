"""Tells systemd that a service is ready, stopping or alive (sd_notify(3))."""

import asyncio
import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send `state` (`READY=1`, `STOPPING=1`, `WATCHDOG=1`) if systemd started this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    # The service goes on if systemd is gone.
    with socket.socket(socket.AF_UNIX, kind) as sender, suppress(OSError):
        sender.sendto(state.encode(), address)


async def feed_watchdog() -> None:
    """Notify systemd twice in each watchdog interval, so that it restarts a stuck event loop."""
    timeout_us, pid = os.environ.get("WATCHDOG_USEC", ""), str(os.getpid())
    while timeout_us.isdigit() and os.environ.get("WATCHDOG_PID", pid) == pid:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(timeout_us) / 2_000_000)
