"""Requests of the benchmark of KV shared in a PoP, and what one large cache would have of them."""

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ops.bench.disaggregation_load import BenchRequest, MixScale, read_trace
from ops.bench.pop_kv_causes import OneCache
from ops.sim.traces import TraceSlice, mooncake
from router.decide.caches.affinity import hash64
from router.decide.caches.prefix_index import PrefixKeys, prefix_keys

SCALE: Final = MixScale("prompts and outputs / 16", 16, 16)
BLOCK_TOKENS: Final = 16
TRACE_REQUESTS: Final = 4000
"""Sessions are chosen from this many requests, the beginning of the trace."""

TURNS_MIN: Final = 3


class SharedRequest(NamedTuple):
    """A request of the trace, and the session that it belongs to."""

    request: BenchRequest
    session: str
    keys: PrefixKeys


def read_requests(path: Path, count: int, draw: str = "") -> list[SharedRequest]:
    """Return whole sessions of several turns, at most `count` requests, scaled.

    Another `draw` chooses other sessions.

    The first hundreds of requests of the trace have next to no prefixes in common.
    """
    rows = mooncake(path, TraceSlice(TRACE_REQUESTS))
    turns = Counter(row.session for row in rows)
    chosen: set[str] = set()
    for session in sorted(turns, key=lambda name: hash64(draw + name)):
        if turns[session] >= TURNS_MIN and turns[session] <= count:
            chosen.add(session)
            count -= turns[session]
    picked = [
        (one, row.session)
        for one, row in zip(read_trace(path, TRACE_REQUESTS, SCALE), rows, strict=True)
        if row.session in chosen
    ]
    first_s = picked[0][0].at_s
    return [
        SharedRequest(
            one._replace(at_s=one.at_s - first_s),
            session,
            prefix_keys(token_bytes(one.prompt), 1),
        )
        for one, session in picked
    ]


def turns_by_session(requests: Sequence[SharedRequest]) -> list[list[SharedRequest]]:
    """Return the requests of each session, in their order."""
    sessions: dict[str, list[SharedRequest]] = {}
    for shared in requests:
        sessions.setdefault(shared.session, []).append(shared)
    return list(sessions.values())


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return a prompt as bytes, as a router sees one: equal beginnings for equal prefixes."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def chain_keys(prompt: Sequence[int]) -> list[bytes]:
    """Return the keys of a prompt's whole blocks, each of all tokens up to its end.

    The last token is always computed.
    """
    chain, key = [], 0
    for first in range(0, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, tuple(prompt[first : first + BLOCK_TOKENS])))
        chain.append(key.to_bytes(8, "little", signed=True))
    return chain


def one_cache_hits(requests: Sequence[SharedRequest], blocks_max: int) -> float:
    """Return the share of prompt tokens that one LRU cache would have."""
    cache = OneCache(blocks_max)
    hits = sum(cache.use(chain_keys(one.request.prompt)) for one in requests)
    return BLOCK_TOKENS * hits / sum(len(one.request.prompt) for one in requests)
