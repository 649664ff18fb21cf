"""32 clients of one key send gzip bombs; how much later does another tenant get its first token?

`python -m ops.attack.gzip_bombs`: bombs at the highest ratio of gzip, and just under the allowed
ratio, from a key that is limited to 1 request a minute and from one without limits. The bodies
come from a process of their own, so that the probes do not wait for them.
"""

import argparse
import asyncio
import gzip
import multiprocessing
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Final

from ops.attack.edge_router import (
    KEY,
    LIMITED_KEY,
    describe,
    measure_ttft_s,
    open_edge_router,
)

CLIENTS: Final = 32
BODY_BYTES: Final = 8 * 1024 * 1024
ATTACK_S: Final = 60.0
PAUSE_S: Final = 0.2
"""Each client sends 5 bodies a second, or as fast as it gets answers."""


def bomb(noise_bytes: int) -> bytes:
    """Return a chat request of BODY_BYTES as gzip; noise lowers its ratio."""
    noise = random.Random(1).randbytes(noise_bytes // 2).hex().encode()
    start = b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"' + noise
    return gzip.compress(start + b"x" * (BODY_BYTES - len(start) - 4) + b'"}]}')


async def _attack(port: int, key: str, body: bytes) -> Counter[str]:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    ).encode()
    statuses: Counter[str] = Counter()

    async def client() -> None:
        while True:
            with suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.timeout(30):
                    writer.write(head + body)
                    statuses[(await reader.read(12))[9:].decode()] += 1
                writer.close()
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.sleep(ATTACK_S)
    for task in tasks:
        task.cancel()
    return statuses


def _attack_process(port: int, key: str, body: bytes) -> None:
    began_s = time.monotonic()
    statuses = asyncio.run(_attack(port, key, body))
    rate = sum(statuses.values()) / (time.monotonic() - began_s)
    sys.stdout.write(f"    answers {dict(statuses)}, {rate:.0f}/s\n")


async def run() -> None:
    """Print the times to first token, alone and beside each attack."""
    attacks = {
        "ratio 1000, key with 1 request/min": (LIMITED_KEY, bomb(0)),
        "ratio 1000, key without limits": (KEY, bomb(0)),
        "ratio below 100, key without limits": (KEY, bomb(140_000)),
    }
    for name, (key, body) in attacks.items():
        async with open_edge_router() as router:
            alone = describe(await measure_ttft_s(router))
            spawn = multiprocessing.get_context("spawn")
            attacker = spawn.Process(target=_attack_process, args=(router.port, key, body))
            attacker.start()
            await asyncio.sleep(3.0)
            beside = describe(await measure_ttft_s(router))
            sys.stdout.write(f"{name} ({len(body)} bytes): alone {alone}; beside {beside}\n")
            attacker.terminate()
            await asyncio.to_thread(attacker.join)


def main() -> None:
    """Read the arguments and attack."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(run())


if __name__ == "__main__":
    main()
