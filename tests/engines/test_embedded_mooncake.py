"""Embedded engines share KV through a real Mooncake Store: each under our agent, on its own node.

`python -m ops.engines.mooncake` installs Mooncake. The tests build on each other's state, so they
run in this order.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

import msgspec
import pytest
import pytest_asyncio

from isochrone.wire.kv import kv_sharing
from isochrone.wire.kv.kv_sharing import FoundTokens
from nodeagent import metrics
from nodeagent.engine.kvcache.block_seal import seal
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence
from nodeagent.engine.scheduler.sequence import StopConditions
from tests.engines.embedded_store import PROMPT_BLOCKS, SETTLED_S, EmbeddedNode, embedded_nodes
from tests.engines.real_engines import READY_S, VLLM_COMMANDS
from tests.engines.store_nodes import move_master, needs_mooncake, runs_only_at
from tests.integration.nodeagent.test_data_plane import SALTS
from tests.integration.nodeagent.test_two_legs import a_prompt
from tests.system.harness import until

STORED: Final = FoundTokens(store=16 * PROMPT_BLOCKS)

pytestmark = [
    needs_mooncake,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

WRITER: Final = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
for line in sys.stdin:
    name, how = line.split()
    content = bytearray(store.get(name))
    assert content, "nothing is stored under this name"
    if how == "flipped":
        content[-1] ^= 1
    elif how == "truncated":
        del content[len(content) // 2:]
    elif how == "endless":
        content *= 4
    else:
        content = bytes.fromhex(how)
    assert store.remove(name, True) == 0
    assert store.put(name, bytes(content)) == 0
    print("written", flush=True)
"""
"""Another member of the store, which writes other contents in the place of blocks."""


Pop = tuple[EmbeddedNode, ...]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pop() -> AsyncIterator[Pop]:
    async with embedded_nodes("a", "b") as nodes:
        yield nodes


def found_in_store() -> float:
    return float(metrics.KV_FOUND_TOKENS.labels("store")._value.get())


async def test_what_one_engine_has_computed_another_finds_in_the_store(pop: Pop) -> None:
    a, b = pop
    prompt, counted = a_prompt(), found_in_store()
    text = await a.stores(prompt)
    assert await b.ask(prompt) == (text, STORED)
    assert found_in_store() == counted + STORED.store
    assert await b.ask(prompt) == (text, FoundTokens(device=STORED.store))
    # The beginning is here, the rest in the store.
    longer = prompt[:100] + a_prompt()[:100]
    text = (await a.ask(longer))[0]

    async def is_stored() -> bool:
        fresh = longer[:192] + a_prompt()[:8]
        return (await b.ask(fresh))[1] in (
            FoundTokens(device=96, store=96),
            FoundTokens(device=192),
        )

    await until("the longer prompt is stored", is_stored, SETTLED_S)
    assert (await b.ask(longer))[0] == text
    # Another tenant finds none of it.
    assert (await b.ask(prompt, "another"))[1] == FoundTokens()


async def format_of(node: EmbeddedNode, prompt: list[int]) -> tuple[str, int]:
    """Return the KV format and the size of an engine's blocks."""
    body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=digests_of(prompt)))
    async with node.engine.http.post(kv_sharing.LOCATE_PATH, data=body) as answer:
        located = await answer.json()
    return located["kv_format"], located["block_bytes"]


def digests_of(prompt: Sequence[int]) -> tuple[bytes, ...]:
    salt = SALTS.salt_of("t").encode()
    sequence = TokenSequence(0, list(prompt), StopConditions(1, frozenset()), salt)
    return tuple(sequence.block_digests(PROMPT_BLOCKS))


@pytest.mark.parametrize("fault", ["flipped", "truncated", "endless", "foreign"])
async def test_a_wrong_block_in_the_store_is_computed_and_replaced(pop: Pop, fault: str) -> None:
    a, b = pop
    prompt, bad = a_prompt(), 5
    text = await a.stores(prompt)
    kv_format, size = await format_of(a, prompt)
    how = fault
    if fault == "foreign":
        # Another block of the same model, with a seal of its own.
        content, other = bytes(size), digests_of(a_prompt())[0]
        sealed = seal(bytes.fromhex(kv_format), other, content)
        how = (sealed.ljust(64, b"\0") + content).hex()
    await write_in_store(a, f"isochrone-{kv_format}-{digests_of(prompt)[bad].hex()}", how)
    wrong = await b.stat("kv_store_wrong_blocks_total")
    assert await b.ask(prompt) == (text, FoundTokens(store=16 * bad))
    if fault in ("flipped", "foreign"):
        # The others do not fit their place.
        assert await b.stat("kv_store_wrong_blocks_total") == wrong + 1
    await until("nothing is held", b.holds_nothing, SETTLED_S)


async def write_in_store(node: EmbeddedNode, name: str, how: str) -> None:
    writer = await asyncio.create_subprocess_exec(
        VLLM_COMMANDS / "python",
        *("-c", WRITER, f"127.0.0.1:{node.ports.master}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    said, _ = await writer.communicate(f"{name} {how}\n".encode())
    assert said == b"written\n", (writer.returncode, said)


async def test_requests_go_on_without_the_master_and_hits_return_with_it(pop: Pop) -> None:
    a, b = pop
    pid = a.master._record.pid if a.master._record else 0
    assert pid
    prompts = [a_prompt() for _ in range(8)]
    asking = [asyncio.create_task(pop[n % 2].ask(prompt)) for n, prompt in enumerate(prompts)]
    os.kill(pid, signal.SIGKILL)
    texts = [(await task)[0] for task in asking]
    again = [(await pop[(n + 1) % 2].ask(prompt))[0] for n, prompt in enumerate(prompts)]
    assert again == texts
    await until("hits return", partial(shares, a, b), SETTLED_S)
    await until("nothing is in flight", partial(are_idle, pop), SETTLED_S)


async def shares(first: EmbeddedNode, second: EmbeddedNode) -> bool:
    """Have one engine compute a new prompt; return whether the other finds it in the store."""
    prompt = a_prompt()
    text, _ = await first.ask(prompt)
    await asyncio.sleep(0.5)
    again, found = await second.ask(prompt)
    assert again == text
    return found.store > 0


async def are_idle(pop: Pop) -> bool:
    return all([one.is_idle() and await one.holds_nothing() for one in pop])


async def test_hits_return_after_the_master_has_moved(pop: Pop) -> None:
    a, b = pop
    move_master(pop, b)
    await until("the master runs at b", partial(runs_only_at, b, a), SETTLED_S)
    await until("hits return", partial(shares, a, b), SETTLED_S)


async def test_a_prefix_outlives_the_engine_that_computed_it(pop: Pop) -> None:
    a, b = pop
    prompts = [a_prompt() for _ in range(20)]
    texts = [await a.stores(prompt) for prompt in prompts]
    os.killpg(a.engine.pid, signal.SIGKILL)
    # It joins once the master no longer names the dead engine's memory.
    await until("a has joined again", a.has_joined, READY_S)
    for one, first in ((a, 0), (b, 1)):
        asked = [await one.ask(prompt) for prompt in prompts[first::2]]
        assert asked == [(text, STORED) for text in texts[first::2]], one.name
    await until("nothing is in flight", partial(are_idle, pop), SETTLED_S)
