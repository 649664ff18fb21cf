"""A call of the PoP's store of KV that hangs does not hold up the end of its engine."""

import subprocess
import sys

EXIT_S = 60.0
SCRIPT = """
import asyncio, threading
from types import SimpleNamespace
from nodeagent.engine.server.kv.kv_store import KvStoreRoutes

async def serve():
    routes = KvStoreRoutes(SimpleNamespace(block_bytes=1), None, None, None)
    assert await routes._run(int, "7") == 7
    begun, never = threading.Event(), threading.Event()
    calls = [asyncio.create_task(routes._run(lambda: (begun.set(), never.wait())))]
    await asyncio.to_thread(begun.wait)
    print("hangs", flush=True)

asyncio.run(serve())
"""


def test_an_engine_ends_although_a_call_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, timeout=EXIT_S, check=False, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "hangs\n"), ended.stderr
