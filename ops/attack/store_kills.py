"""kill -9 of parts of a PoP's KV store at seeded instants under load: is any token lost?

    python -m ops.attack.store_kills [--instants 50] [--first 0] [--seed 1] [--victim NAME ...]

Three nodes have an embedded engine each, which belong to a real Mooncake Store (`python -m
ops.engines.mooncake`). At each instant requests for some new prompts are under way, each prompt at
two nodes, and one part is killed: the store's master, the master while the assignment moves it to
another node, or an engine with the memory that it gave to the store. Each prompt has one right
answer. Only requests at a killed engine may fail. Afterwards the store has to work again, from one
node to another, and no node may hold tokens or KV blocks. The table that one run printed is in
store_kills.md.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import aiohttp
import msgspec

from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv.kv_sharing import KV_FOUND, FoundTokens, parse_found
from ops.attack.kills import AttackFailed, is_given_beside_others, run_attack
from tests.engines.embedded_store import EmbeddedNode, embedded_nodes
from tests.engines.store_nodes import move_master
from tests.system import equal_priority
from tests.system.harness import until

__all__ = ("equal_priority",)

VICTIMS: Final = ("master", "moving master", "member")
PROMPTS: Final = 5
PROMPT_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 8
TOKENS: Final = 60
"""Prompts are of tokens below this one."""
WITHIN_S: Final = 0.4
"""The requests of an instant begin within this time, and the part is killed within it."""
CLEAN_S: Final = 120.0


class StoreAnswer(NamedTuple):
    """An answer: its text, "" if there is none, and where its prompt's KV was found."""

    text: str
    found: FoundTokens


class StoreKillOutcome(NamedTuple):
    """How the requests of one instant ended."""

    whole: int
    failed: int
    store_tokens: int
    """The prompt tokens that the store had, also during the loss."""
    rounded: int


async def ask(node: EmbeddedNode, prompt: Sequence[int], tenant: str) -> StoreAnswer:
    """Send a request as a router does."""
    sent = {
        headers.REPLICA: node.name,
        headers.CACHE_SALT: tenant,
        headers.TOKENS: f"p={len(prompt)};o={OUTPUT_TOKENS}",
        headers.PENDING_PREFILL_TOKENS: str(len(prompt)),
        headers.PREFILL_MS: "4000",
    }
    body = {"prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body["ignore_eos"] = True
    try:
        async with node.node.http.post("/v1/completions", json=body, headers=sent) as response:
            content = await response.read()
            if response.status != 200:
                return StoreAnswer("", FoundTokens())
            found = parse_found(response.headers.get(KV_FOUND, ""))
    except (aiohttp.ClientError, OSError):
        return StoreAnswer("", FoundTokens())
    answer = msgspec.json.decode(content)
    if answer["usage"]["completion_tokens"] != OUTPUT_TOKENS:
        raise AttackFailed(f"an answer of {answer['usage']} tokens")
    return StoreAnswer(answer["choices"][0]["text"], found)


async def attack_once(
    nodes: Sequence[EmbeddedNode], victim: str, instant: int, seed: int
) -> StoreKillOutcome:
    """Kill one part while requests are under way; return how these ended."""
    chance = random.Random(f"{seed} {victim} {instant}")
    name, tenant = f"{victim}, instant {instant}", f"{victim} {instant}"
    prompts = [[chance.randrange(1, TOKENS) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    alone = await asyncio.gather(*(ask(nodes[0], one, f"alone {tenant}") for one in prompts))
    if not all(answer.text for answer in alone):
        raise AttackFailed(f"{name}: no answer before the attack")
    target = chance.choice(nodes)
    requests = [(number, node) for number in range(PROMPTS) for node in chance.sample(nodes, 2)]

    async def request(number: int, node: EmbeddedNode, delay_s: float) -> StoreAnswer:
        await asyncio.sleep(delay_s)
        return await ask(node, prompts[number], tenant)

    async def kill(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await kill_part(nodes, victim, target)

    killing = asyncio.create_task(kill(chance.uniform(0, WITHIN_S)))
    answers = await asyncio.gather(
        *(request(*one, chance.uniform(0, WITHIN_S)) for one in requests)
    )
    await killing
    rounded = 0
    for (number, node), answer in zip(requests, answers, strict=True):
        may_fail = victim == "member" and node is target
        if not answer.text and not may_fail:
            raise AttackFailed(f"{name}: an answer of {node.name} was lost")
        if answer.text and answer.text != alone[number].text:
            if not await is_rounding(nodes[0], prompts[number], answer.text, tenant):
                raise AttackFailed(f"{name}: {answer.text!r}, not {alone[number].text!r}")
            rounded += 1
    await wait_clean(nodes, name, chance)
    return StoreKillOutcome(
        whole=sum(bool(answer.text) for answer in answers),
        failed=sum(not answer.text for answer in answers),
        store_tokens=sum(answer.found.store for answer in answers),
        rounded=rounded,
    )


async def kill_part(nodes: Sequence[EmbeddedNode], victim: str, target: EmbeddedNode) -> None:
    """Kill -9 the engine of `target`, or the master, which moves to `target` if it is to move."""
    if victim == "member":
        os.killpg(target.engine.pid, signal.SIGKILL)
        return
    for node in nodes:
        record = node.master._record
        if record is not None and node.master.port:
            os.kill(record.pid, signal.SIGKILL)
    if victim == "moving master":
        move_master(nodes, target)


async def is_rounding(node: EmbeddedNode, prompt: Sequence[int], text: str, tenant: str) -> bool:
    """Return whether an engine gives this text without the store, too, beside others."""

    async def ask_again(name: str) -> str:
        return (await ask(node, prompt, name)).text

    return await is_given_beside_others(text, ask_again, tenant, range(2, 6))


async def wait_clean(nodes: Sequence[EmbeddedNode], name: str, chance: random.Random) -> None:
    """Wait until all engines are back in the store, share through it, and hold nothing."""

    async def is_whole() -> bool:
        return all([await node.has_joined() for node in nodes])

    async def shares() -> bool:
        first, second = chance.sample(nodes, 2)
        prompt = [chance.randrange(1, TOKENS) for _ in range(PROMPT_TOKENS)]
        written = await ask(first, prompt, "after")
        await asyncio.sleep(0.3)
        read = await ask(second, prompt, "after")
        return bool(written.text) and read.text == written.text and read.found.store > 0

    async def holds_nothing() -> bool:
        return all([node.is_idle() and await node.holds_nothing() for node in nodes])

    try:
        await until("all engines have joined again", is_whole, CLEAN_S)
        await until("the store works again", shares, CLEAN_S)
        await until("nothing is held", holds_nothing, CLEAN_S)
    except AssertionError as error:
        raise AttackFailed(f"{name}: {error}") from error


async def attack(
    instants: Sequence[int], seed: int, victims: Sequence[str]
) -> dict[str, list[StoreKillOutcome]]:
    """Run the attack; return the outcomes of each victim. Raises AttackFailed."""
    outcomes: dict[str, list[StoreKillOutcome]] = {victim: [] for victim in victims}
    async with embedded_nodes("a", "b", "c") as nodes:
        for instant in instants:
            for victim in victims:
                for node in nodes:
                    # So that no kill makes a replica wait before it starts again.
                    replica = node.node.supervisor.replicas[ReplicaId(node.name)]
                    replica.failure_times.clear()
                outcome = await attack_once(nodes, victim, instant, seed)
                outcomes[victim].append(outcome)
                print(victim, instant, *outcome, flush=True, file=sys.stderr)
    return outcomes


def format_table(outcomes: Mapping[str, Sequence[StoreKillOutcome]]) -> list[str]:
    """Return the lines of a table: a row for each victim."""
    rows = [
        "| killed | instants | answers whole | failed at the killed engine | prompt tokens from the"
        " store | rounded otherwise |",
        "|---|---|---|---|---|---|",
    ]
    for victim, of_victim in outcomes.items():
        sums = [sum(column) for column in zip(*of_victim, strict=True)]
        rows.append(f"| {' | '.join(map(str, [victim, len(of_victim), *sums]))} |")
    return rows


if __name__ == "__main__":
    sys.exit(run_attack("ops.attack.store_kills", VICTIMS, attack, format_table))
