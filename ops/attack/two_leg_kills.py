"""kill -9 of each part of two-leg requests at seeded instants under load: is any token lost?

    python -m ops.attack.two_leg_kills [--instants 50] [--first 0] [--seed 1] [--victim NAME ...]

One node answers, and two have replicas that read its prompts; each node's agent and engine are
processes. At each instant several streams are under way and one process is killed: the prefill
engine, the decode engine, or the agent of either. Streams are sampled with seeds, so each has one
right text. An answer that was ended in order has to be that text, one that was cut a beginning of
it. Only those at the decode node may be cut. Afterwards the part that was killed has to come back,
and no node may hold tokens or KV blocks. A node of the prefill side that is gone costs no answer.

An instant is drawn within a phase, in turn: while a prompt is read, while KV arrives at the decode
engine, and after so many tokens of all streams. It begins when the phase is seen. Before each
instant KV has to have arrived from the replica that may be killed. ops.attack.fetch_kills does the
same to fetches of cached KV. The table that one run printed is in two_leg_kills.md.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch

from ops.attack.kills import AttackFailed, is_at_border, is_given_beside_others, run_attack
from ops.attack.two_leg_nodes import (
    DECODE,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    READERS,
    NumberedRequest,
    Pair,
    StreamedAnswer,
    a_pair,
    a_request,
)

VICTIMS: Final = ("prefill engine", "decode engine", "prefill agent", "decode agent")
STREAMS: Final = 4
BLOCK_TOKENS: Final = 16
STREAMS_WITHIN_S: Final = 0.2
"""The streams of an instant begin within this time."""

KILLS_PER_FLEET: Final = 40
USED_S: Final = 120.0


class KillPhase(StrEnum):
    """The work in progress when a part is killed."""

    READING = "prompt being read"
    ASKING = "holder being asked"
    TRANSFER = "KV arriving"
    STREAMING = "mid-stream"


class StreamProgress:
    """The progress of the streams of one instant, as their client sees it."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.tokens = [0] * STREAMS
        self.has_ended = [False] * STREAMS
        self._changed = asyncio.Event()

    def receive(self, stream: int, tokens: int) -> None:
        """Note how many tokens of a stream have arrived."""
        self.tokens[stream] = tokens
        self._changed.set()

    def end(self, stream: int) -> None:
        """Note the end of a stream."""
        self.has_ended[stream] = True
        self._changed.set()

    async def reach(self, tokens: int) -> bool:
        """Wait for so many tokens of all streams together; return False if all ended before."""
        while sum(self.tokens) < tokens and not all(self.has_ended):
            self._changed.clear()
            await self._changed.wait()
        return not all(self.has_ended)

    def mid_stream(self) -> int:
        """Return how many streams have tokens and go on."""
        return sum(
            tokens > 0 and not ended
            for tokens, ended in zip(self.tokens, self.has_ended, strict=True)
        )

    def waiting(self) -> int:
        """Return how many streams have no token yet."""
        return sum(
            not tokens and not ended
            for tokens, ended in zip(self.tokens, self.has_ended, strict=True)
        )


class KillOutcome(NamedTuple):
    """The state of the streams of one instant when a part was killed, and how they ended."""

    phase: KillPhase
    was_in_phase: bool
    waiting: int
    mid_stream: int
    whole: int
    cut: int
    none: int
    rounded: int = 0
    """Answers with a text that rounding explains."""
    peer_tokens: int = 0
    """Prompt tokens whose KV was fetched."""


class PeerUse(Protocol):
    """The use that the attack's requests make of other replicas."""

    phases: Sequence[KillPhase]
    share_kv: bool
    phase_s: float
    """A part is killed at most so long after its phase was seen."""

    def peers(self, pair: Pair, others: Sequence[str]) -> dict[str, str]:
        """Return the headers of a request that may use these replicas, in this order."""

    async def prepare(
        self, pair: Pair, others: Sequence[str], requests: Sequence[NumberedRequest], tenant: str
    ) -> None:
        """Have these replicas do what comes before the requests."""


class TwoLegs:
    """Other replicas read the prompts."""

    phases: Sequence[KillPhase] = (KillPhase.READING, KillPhase.TRANSFER, KillPhase.STREAMING)
    share_kv = False
    phase_s = 0.06  # A prompt takes about as long.

    def peers(self, pair: Pair, others: Sequence[str]) -> dict[str, str]:
        """Return the header that names the readers."""
        return pair.may_read(others)

    async def prepare(
        self, pair: Pair, others: Sequence[str], requests: Sequence[NumberedRequest], tenant: str
    ) -> None:
        """Do nothing."""


async def wait_for(pair: Pair, phase: KillPhase, reader: str, progress: StreamProgress) -> bool:
    """Wait until a phase is seen; return False if all streams ended before."""
    if phase is KillPhase.ASKING:
        await progress.began.wait()
        return True
    engine = reader if phase is KillPhase.READING else DECODE
    counts = "running" if phase is KillPhase.READING else "kv_transfer_held_blocks"
    while not all(progress.has_ended):
        if (await pair.engines[engine].stats())[counts]:
            return True
        await asyncio.sleep(0.002)
    return False


async def wait_used(pair: Pair, use: PeerUse, other: str, chance: random.Random) -> None:
    """Wait until KV arrives from a replica, through a window of its engine.

    After a kill, the first attempts may fail.
    """

    async def counts() -> tuple[int, int]:
        received = (await pair.engines[DECODE].stats())["kv_transfer_received_blocks_total"]
        return received, await pair.window_leases()

    async with asyncio.timeout(USED_S):
        while True:
            blocks, leases = await counts()
            request = a_request(chance)
            await use.prepare(pair, [other], [request], "used")
            await pair.ask(request, "used", use.peers(pair, [other]))
            blocks_now, leases_now = await counts()
            if blocks_now > blocks and leases_now > leases:
                return


async def text_alone(pair: Pair, request: NumberedRequest, tenant: str) -> str:
    """Return the answer to a request while nothing else runs. Raises AttackFailed."""
    alone = await pair.ask(request, tenant)
    if not alone.is_whole:
        raise AttackFailed(f"{tenant}: no answer before the attack")
    return alone.text


async def attack_once(
    pair: Pair, use: PeerUse, victim: str, instant: int, seed: int
) -> KillOutcome:
    """Kill one part while streams are under way; return how these ended."""
    chance = random.Random(f"{seed} {victim} {instant}")
    phase = use.phases[instant % len(use.phases)]
    requests = [a_request(chance) for _ in range(STREAMS)]
    expected = [await text_alone(pair, request, f"alone {instant}") for request in requests]
    # All prompts are read by the one that may be killed, as long as it lives.
    readers = chance.sample(READERS, len(READERS))
    is_decode = victim.startswith(("decode", "fetching"))
    target = pair.engines[DECODE if is_decode else readers[0]]
    await target.forget_crashes()
    tenant = f"{victim} {instant}"
    await wait_used(pair, use, readers[0], random.Random(f"used {seed} {tenant}"))
    # At every second instant of a phase no other replica has their KV.
    ready = readers[: 1 + instant // len(use.phases) % 2]
    await use.prepare(pair, ready, requests, tenant)
    progress = StreamProgress()

    async def stream(number: int, delay_s: float) -> StreamedAnswer:
        await asyncio.sleep(delay_s)
        progress.began.set()
        answer = await pair.ask(
            requests[number],
            tenant,
            use.peers(pair, readers),
            lambda tokens: progress.receive(number, tokens),
        )
        progress.end(number)
        return answer

    async def kill_within(share: float) -> KillOutcome:
        if phase is KillPhase.STREAMING:
            reached = await progress.reach(1 + int(share * (STREAMS * OUTPUT_TOKENS - 1)))
        else:
            reached = await wait_for(pair, phase, readers[0], progress)
            await asyncio.sleep(share * use.phase_s)
        (target.kill if victim.endswith("engine") else target.node.kill_agent)()
        return KillOutcome(phase, reached, progress.waiting(), progress.mid_stream(), 0, 0, 0)

    killing = asyncio.create_task(kill_within(chance.random()))
    delays_s = [chance.uniform(0, STREAMS_WITHIN_S) for _ in requests]
    answers = await asyncio.gather(*map(stream, range(STREAMS), delays_s))
    outcome = await killing
    if victim.endswith("agent"):
        await target.node.restart_agent()
    name = f"{victim}, instant {instant} ({phase})"
    try:
        await pair.wait_clean()
    except TimeoutError as error:
        raise AttackFailed(f"{name}: {pair.last_left}") from error
    rounded = 0
    for request, text, answer in zip(requests, expected, answers, strict=True):
        if not (answer.is_whole or is_decode):
            raise AttackFailed(f"{name}: an answer was lost")
        if answer.text != text if answer.is_whole else not text.startswith(answer.text):
            if not await is_rounding(pair, request, answer.text):
                raise AttackFailed(f"{name}: {answer.text!r}, not {text!r}")
            rounded += 1
    return outcome._replace(
        rounded=rounded,
        whole=sum(answer.is_whole for answer in answers),
        cut=sum(bool(answer.text) and not answer.is_whole for answer in answers),
        none=sum(not answer.text and not answer.is_whole for answer in answers),
        peer_tokens=sum(answer.peer_tokens for answer in answers),
    )


async def is_rounding(pair: Pair, request: NumberedRequest, text: str) -> bool:
    """Return whether the decode engine alone gives this text, too, beside others or in pieces.

    A prompt that is read in two pieces is rounded otherwise, too.
    """
    for tokens in range(0, PROMPT_TOKENS, BLOCK_TOKENS):
        first = NumberedRequest(request.prompt[:tokens], request.seed, 1)

        async def ask(tenant: str, first: NumberedRequest = first) -> str:
            if first.prompt:
                await pair.ask(first, tenant)
            return (await pair.ask(request, tenant)).text

        name = f"{request.seed} {tokens}"
        if await is_given_beside_others(text, ask, name, range(1, STREAMS + 1)):
            return True
    return await is_border_draw(pair, request, text)


async def is_border_draw(pair: Pair, request: NumberedRequest, text: str) -> bool:
    """Return whether the first other token of this text is next to the right one, and the draw at
    their border: there are more ways to round than can be tried.

    The engine draws from the tokens in the order of their probability.
    """
    alone = (await pair.ask(request, f"border {request.seed}")).text
    pairs = enumerate(zip(alone, text, strict=False))
    place = next((place for place, (right, other) in pairs if right != other), -1)
    if place < 0:
        return False
    likeliest = await pair.likeliest(request, place)
    generator = torch.Generator("cpu").manual_seed(request.seed)
    for _ in range(place + 1):
        point = float(torch.rand((), generator=generator, dtype=torch.float64))
    return is_at_border(likeliest, text[place], point)


async def attack(
    instants: Sequence[int],
    seed: int,
    victims: Sequence[str] = VICTIMS,
    *,
    use: PeerUse | None = None,
    echo: bool = False,
    on_one_node: bool = False,
) -> dict[str, list[KillOutcome]]:
    """Run the attack; return the outcomes of each victim. Raises AttackFailed."""
    use = use or TwoLegs()
    outcomes: dict[str, list[KillOutcome]] = {victim: [] for victim in victims}
    kills = [(victim, instant) for instant in instants for victim in victims]
    for first in range(0, len(kills), KILLS_PER_FLEET):
        with tempfile.TemporaryDirectory(prefix="kill") as folder:
            async with a_pair(Path(folder), on_one_node=on_one_node, share_kv=use.share_kv) as pair:
                for victim, instant in kills[first : first + KILLS_PER_FLEET]:
                    outcomes[victim].append(await attack_once(pair, use, victim, instant, seed))
                    if echo:
                        print(victim, instant, *outcomes[victim][-1], flush=True, file=sys.stderr)
    return outcomes


def format_table(outcomes: Mapping[str, Sequence[KillOutcome]]) -> list[str]:
    """Return the lines of a table: a row for each victim and phase."""
    rows = [
        "| killed | phase | instants | in the phase | streams without a token then | in mid-stream"
        " | whole | cut | no token | rounded otherwise | prompt tokens fetched |",
        f"|{'---|' * 11}",
    ]
    for victim, of_victim in outcomes.items():
        for phase in KillPhase:
            of_phase = [outcome for outcome in of_victim if outcome.phase is phase]
            sums = [sum(column) for column in zip(*(kill[1:] for kill in of_phase), strict=True)]
            cells = [victim, phase, len(of_phase), *sums]
            rows += [f"| {' | '.join(map(str, cells))} |"] if of_phase else []
    return rows


if __name__ == "__main__":
    sys.exit(
        run_attack("ops.attack.two_leg_kills", VICTIMS, partial(attack, echo=True), format_table)
    )
