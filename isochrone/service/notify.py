"""What a service tells systemd: ready, stopping, alive (sd_notify(3))."""

import asyncio
import os
import socket


def notify(state: str) -> bool:
    """Send `state` (`READY=1`, `STOPPING=1`, `WATCHDOG=1`); False where nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), address)
        except OSError:
            # systemd going away must not take the service with it.
            return False
    return True


def watchdog_interval_s() -> float | None:
    """Return how often systemd wants `WATCHDOG=1` (half its time-out), or None."""
    text = os.environ.get("WATCHDOG_USEC", "")
    if not text.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 2_000_000


async def feed_watchdog() -> None:
    """Tell systemd that the event loop turns, as often as it wants: what hangs is restarted."""
    interval_s = watchdog_interval_s()
    while interval_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
