"""What a service tells systemd: ready, stopping, alive (sd_notify(3))."""

import asyncio
import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send `state` (`READY=1`, `STOPPING=1`, `WATCHDOG=1`), where somebody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    # systemd going away must not take the service with it.
    with socket.socket(socket.AF_UNIX, kind) as sender, suppress(OSError):
        sender.sendto(state.encode(), address)


async def feed_watchdog() -> None:
    """Tell systemd that the event loop turns, as often as it wants: what hangs is restarted."""
    timeout_us, own = os.environ.get("WATCHDOG_USEC", ""), str(os.getpid())
    while timeout_us.isdigit() and os.environ.get("WATCHDOG_PID", own) == own:
        notify("WATCHDOG=1")
        await asyncio.sleep(int(timeout_us) / 2_000_000)
