"""One key leaves 100 bodies of 8 MiB unfinished; how much memory does the router hold?

`python -m ops.attack.held_bodies`: sent in large parts, and in chunks of 2 bytes.
"""

import argparse
import asyncio
import sys
from contextlib import suppress
from typing import Final

from ops.attack.edge_router import KEY, EdgeRouter, open_edge_router

BODIES: Final = 100
BODY_BYTES: Final = 8 * 1024 * 1024
SMALL_CHUNKS_BYTES: Final = 1024 * 1024
"""Bytes of each body in chunks of 2, which cost 7 bytes each to send."""

SAMPLES_AFTER: Final = 40
"""Samples of the router's memory once all is sent, 50 ms apart."""


async def _leave_unfinished(router: EdgeRouter, is_small: bool) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    framing = "transfer-encoding: chunked" if is_small else f"content-length: {BODY_BYTES}"
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {KEY}\r\n{framing}\r\n\r\n"
    )
    body = b"2\r\nxx\r\n" * (SMALL_CHUNKS_BYTES // 2) if is_small else bytes(BODY_BYTES - 1)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(20):
            writer.write(head.encode() + body)
            await writer.drain()
    return writer


async def run() -> None:
    """Print the growth of the router's memory for both kinds."""
    for is_small in (False, True):
        async with open_edge_router() as router:
            before = highest = router.process.memory_info().rss
            opened = [
                asyncio.create_task(_leave_unfinished(router, is_small)) for _ in range(BODIES)
            ]
            samples_left = SAMPLES_AFTER
            while samples_left:
                highest = max(highest, router.process.memory_info().rss)
                samples_left -= all(task.done() for task in opened)
                await asyncio.sleep(0.05)
            kind = f"{SMALL_CHUNKS_BYTES} bytes in chunks of 2" if is_small else "8 MiB less a byte"
            grown = (highest - before) / 2**20
            sys.stdout.write(f"{BODIES} unfinished bodies of {kind}: +{grown:.0f} MiB\n")
            for task in opened:
                task.result().close()


def main() -> None:
    """Read the arguments and attack."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(run())


if __name__ == "__main__":
    main()
