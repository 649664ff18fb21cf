"""Requests of real traces, and of sessions drawn from measured clients.

A request's prompt is a chain of block hashes, as traces have it: equal hashes mean equal text from
the beginning up to there. All requests of a session come from one city.
"""

import json
import random
from collections import Counter
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.wire.ids import TenantId
from ops.sim import data
from router.decide.caches.affinity import hash64

MOONCAKE_BLOCK: Final = 512
SHARED_USES: Final = 50
"""A block among the first four of so many requests belongs to a system prompt."""

SESSION_BLOCK: Final = 64
THINK_S: Final = 40.0
TURNS_MEAN: Final = 4.0
TURNS_MAX: Final = 24
PROMPT_TOKENS_MAX: Final = 32_000
SESSIONS_SEED: Final = 7
WINDOWS_PER_DAY: Final = 144
"""ServeGen has a client's rate for every ten minutes."""
AZURE: Final = "azure2023_conv.csv.gz"
VIDUR: Final = "vidur_arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"


class TraceRequest(NamedTuple):
    """One request of a trace."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int
    session: str
    place: float
    """In [0, 1): chooses the city it comes from, by the shares of demand."""
    ttft_s: float = 0.0
    """Within how long the client needs the first token; 0 if it does not say."""


class TraceSlice(NamedTuple):
    """The part of a trace to read, and the seed that draws the cities of its sessions.

    Ranking was tuned with seed 0.
    """

    most: int
    skip: int = 0
    seed: int = 0


def session_place(session: str, seed: int = 0) -> float:
    """Return a session's `place`, always the same for one seed."""
    return hash64(f"{seed}/{session}" if seed else session) / 2**64


def mooncake(path: Path, part: TraceSlice) -> list[TraceRequest]:
    """Read the conversation trace of Mooncake, and derive its sessions from the blocks.

    A request continues the session in which its deepest known block appeared first, unless many
    requests share that block (a system prompt).
    """
    lines = islice(data.lines(path), part.skip, part.skip + part.most)
    rows = [json.loads(line) for line in lines]
    uses = Counter(block for row in rows for block in row["hash_ids"][:4])
    session_of: dict[int, str] = {}
    requests = []
    for number, row in enumerate(rows):
        blocks = tuple(row["hash_ids"])
        known = [block for block in blocks if block in session_of and uses[block] < SHARED_USES]
        session = session_of[known[-1]] if known else f"s{number}"
        for block in blocks:
            session_of.setdefault(block, session)
        requests.append(
            TraceRequest(
                number,
                (row["timestamp"] - rows[0]["timestamp"]) / 1000,
                row["input_length"],
                max(1, row["output_length"]),
                # Only whole blocks are cached, and the last one is seldom whole.
                blocks[: row["input_length"] // MOONCAKE_BLOCK],
                MOONCAKE_BLOCK,
                session,
                session_place(session, part.seed),
            )
        )
    return _spread(requests)


def _spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Spread requests with the same coarse timestamp evenly until the next timestamp."""
    ticks = sorted({request.at_s for request in requests})
    following = dict(zip(ticks, [*ticks[1:], ticks[-1] + 1.0], strict=True))
    counts = Counter(request.at_s for request in requests)
    seen: Counter[float] = Counter()
    spread = []
    for request in requests:
        width_s = min(following[request.at_s] - request.at_s, 3.0)
        at_s = request.at_s + width_s * seen[request.at_s] / counts[request.at_s]
        seen[request.at_s] += 1
        spread.append(request._replace(at_s=at_s))
    return spread


def azure(path: Path, part: TraceSlice) -> list[TraceRequest]:
    """Read the conversation trace of Azure 2023: lengths and times, without common prefixes."""
    requests: list[TraceRequest] = []
    first = None
    rows = islice(data.rows(path), part.skip, part.skip + part.most)
    for number, row in enumerate(rows):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or when
        tokens = int(row["ContextTokens"])
        requests.append(
            TraceRequest(
                number,
                (when - first).total_seconds(),
                max(1, tokens),
                max(1, int(row["GeneratedTokens"])),
                tuple(number * 10_000 + n for n in range(tokens // SESSION_BLOCK)),
                SESSION_BLOCK,
                "",
                session_place(f"a{number}", part.seed),
            )
        )
    return requests


def summaries(folder: Path, part: TraceSlice) -> list[TraceRequest]:
    """Combine the lengths of arXiv papers to summarise with the arrival times of Azure 2023."""
    lengths = islice(data.rows(folder / VIDUR), part.skip, part.skip + part.most)
    requests = azure(folder / AZURE, part)
    return [
        request._replace(
            prompt_tokens=(tokens := int(row["num_prefill_tokens"])),
            output_tokens=max(1, int(row["num_decode_tokens"])),
            blocks=tuple(request.number * 10_000 + n for n in range(tokens // SESSION_BLOCK)),
        )
        for request, row in zip(requests, lengths, strict=False)
    ]


class _ServeGenClient(NamedTuple):
    tenant: TenantId
    rate: float
    prompt: list[tuple[float, float]]
    output: list[tuple[float, float]]


def sessions(folder: Path, part: TraceSlice, model: str = "m-large") -> list[TraceRequest]:
    """Draw conversations of the clients that ServeGen measured, with their rates and lengths.

    ServeGen has no turns, thinking times or shared system prompts: those are assumed. A turn's
    prompt is the whole conversation before it and a new message.
    """
    chance = random.Random(part.seed or SESSIONS_SEED)
    clients = _clients(folder, model)
    total = sum(client.rate for client in clients)
    most = part.most
    duration_s = most / 5.0
    requests: list[TraceRequest] = []
    system = {client.tenant: chance.randint(3, 30) for client in clients}
    for client in clients:
        expected = most * client.rate / total / TURNS_MEAN
        for _ in range(round(expected + chance.random() - 0.5)):
            begins_s = chance.uniform(0, duration_s)
            requests += _conversation(client, system[client.tenant], begins_s, chance)
    requests = [request for request in requests if request.at_s < duration_s]
    requests.sort(key=lambda request: request.at_s)
    return [request._replace(number=number) for number, request in enumerate(requests)]


def _conversation(
    client: _ServeGenClient, system_blocks: int, at_s: float, chance: random.Random
) -> list[TraceRequest]:
    session = f"{client.tenant}/{chance.getrandbits(48):x}"
    tenant = hash64(client.tenant) % 10**9
    blocks = [tenant * 1000 + n for n in range(system_blocks)]
    tokens = system_blocks * SESSION_BLOCK
    turns = []
    own = hash64(session) % 10**12 * 10**6
    for turn in range(TURNS_MAX):
        words = (
            _draw_from_quantiles(client.prompt, chance)
            if turn == 0
            else chance.lognormvariate(4.6, 0.8)
        )
        tokens = min(PROMPT_TOKENS_MAX, tokens + max(8, int(words)))
        output = max(1, int(_draw_from_quantiles(client.output, chance)))
        while len(blocks) < tokens // SESSION_BLOCK:
            blocks.append(own + len(blocks))
        turns.append(
            TraceRequest(
                0,
                at_s,
                tokens,
                output,
                tuple(blocks),
                SESSION_BLOCK,
                session,
                session_place(session),
            )
        )
        if chance.random() < 1 / TURNS_MEAN or tokens >= PROMPT_TOKENS_MAX:
            break
        # The answer is part of the next prompt, and cached with this prompt.
        tokens = min(PROMPT_TOKENS_MAX, tokens + output)
        at_s += output * 0.02 + chance.expovariate(1 / THINK_S)
    return turns


def _clients(folder: Path, model: str) -> list[_ServeGenClient]:
    rates: dict[str, list[float]] = {}
    for row in data.rows(folder / f"{model}_client_rates.csv.gz"):
        if float(row["t_s"]) < 86_400:
            rates.setdefault(row["client"], []).append(float(row["rate_rps"]))
    lengths: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in data.rows(folder / f"{model}_client_tokens.csv.gz"):
        key = (row["client"], row["field"])
        if key not in lengths:
            shares = (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
            lengths[key] = [(share, float(row[name])) for name, share in shares]
    return [
        _ServeGenClient(
            TenantId(f"t{name}"),
            sum(rates_rps) / WINDOWS_PER_DAY,
            lengths[name, "input_tokens"],
            lengths[name, "output_tokens"],
        )
        for name, rates_rps in rates.items()
        if (name, "input_tokens") in lengths and (name, "output_tokens") in lengths
    ]


def _draw_from_quantiles(quantiles: list[tuple[float, float]], chance: random.Random) -> float:
    """Draw a value, interpolating linearly between quantiles."""
    share = chance.random()
    below = (0.0, quantiles[0][1] * 0.5)
    for above in quantiles:
        if share <= above[0]:
            part = (share - below[0]) / (above[0] - below[0])
            return below[1] + part * (above[1] - below[1])
        below = above
    return quantiles[-1][1]
