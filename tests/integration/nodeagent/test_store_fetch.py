"""A node decides about the PoP's store of KV as about other nodes: by rates, quotas, deadlines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.kv_store import STORE_COPIES
from nodeagent import metrics
from nodeagent.decide.requests.kv_fetch import BACKOFF_S
from nodeagent.decide.requests.kv_quota import NO_KV_LIMITS, KvQuota, KvRateLimits, KvUser
from nodeagent.disaggregation.kv_fetch import FetchedPrefix, FetchRates, KvHolders, PrefixFetcher
from nodeagent.disaggregation.prompt_copies import BLOCKS_MIN, PromptForStore, StoreCopies
from nodeagent.disaggregation.store_fetch import StoreFetch
from tests.system.harness import until

BLOCK_BYTES = 1000
DIGESTS = tuple(bytes([number]) * 32 for number in range(20))
USER = KvUser(DeploymentId("d"), "t")
HERE = PeerReplica(ReplicaId("r"), NodeId("n"), "", 320, 6400, 20_000)
NO_PEERS: Any = None


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """An engine whose store has `stored` blocks of every chain."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stored = self.gives = 20
        self.fails = self.hangs = False
        self.lost_at = ""
        self.took_s = 0.01
        self.wanted: list[str] = []
        self.kept: list[int] = []
        self.may_keep = asyncio.Event()
        self.may_keep.set()

    def lose(self, request: web.Request) -> None:
        """Close the connection if the engine is lost at this request."""
        if self.lost_at and request.path.startswith(self.lost_at):
            assert request.transport is not None
            request.transport.close()

    async def locate(self, request: web.Request) -> web.Response:
        self.lose(request)
        if self.hangs:
            await asyncio.Event().wait()
        query = msgspec.msgpack.decode(await request.read(), type=kv_sharing.BlockQuery)
        held = len(DIGESTS) - len(query.digests)
        located = kv_sharing.LocatedBlocks(blocks=max(0, self.stored - held), block_bytes=0)
        return web.Response(body=msgspec.json.encode(located))

    async def move(self, request: web.Request) -> web.Response:
        self.lose(request)
        wanted = request.query["blocks"]
        self.wanted.append(wanted)
        self.clock.now_s += self.took_s
        blocks = 0 if self.fails else min(int(wanted), self.gives)
        received = kv_transfer.ReceivedBlocks(blocks=blocks, transfer_bytes=0, cached_tokens=0)
        return web.Response(body=msgspec.json.encode(received))

    async def keep(self, request: web.Request) -> web.Response:
        await self.may_keep.wait()
        query = msgspec.msgpack.decode(await request.read(), type=kv_sharing.BlockQuery)
        if self.fails:
            return web.Response(status=500)
        self.kept.append(len(query.digests))
        located = kv_sharing.LocatedBlocks(blocks=len(query.digests), block_bytes=BLOCK_BYTES)
        return web.Response(body=msgspec.json.encode(located))


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[aiohttp.ClientSession]:
    app = web.Application()
    app.router.add_post(kv_sharing.STORE_LOCATE_PATH, engine.locate)
    app.router.add_post(kv_sharing.STORE_KEEP_PATH, engine.keep)
    app.router.add_post(kv_sharing.STORE_FETCH_PATH + "{transfer}", engine.move)
    async with (
        serve_http(app, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        yield http


class StoreReader:
    """The fetches of one replica, from the store alone."""

    def __init__(
        self, http: aiohttp.ClientSession, clock: Clock, limits: KvRateLimits = NO_KV_LIMITS
    ) -> None:
        self.rates, self.quota = FetchRates(), KvQuota(limits)
        self.fetcher = PrefixFetcher(
            http,
            NO_PEERS,
            self.rates,
            self.quota,
            USER,
            clock,
            store=StoreFetch(http, self.rates.store, clock),
        )

    async def fetch(self, held: int = 2, deadline_s: float = inf) -> FetchedPrefix | None:
        expected = kv_transfer.ExpectedPrompt(
            prompt_tokens=321,
            blocks=20,
            cached_blocks=held,
            held_blocks=held,
            block_tokens=16,
            block_bytes=BLOCK_BYTES,
            digests=DIGESTS,
        )
        holders = KvHolders(HERE, (), "")
        return await self.fetcher.fetch("0" * 32, expected, holders, deadline_s)


def outcome(name: str) -> float:
    return float(metrics.KV_FETCHES.labels(name)._value.get())


async def test_what_is_missing_here_is_fetched_from_the_store() -> None:
    clock = Clock()
    engine = Engine(clock)
    async with serving(engine) as http:
        reader = StoreReader(http, clock)
        fetched = await reader.fetch()
        assert fetched is not None
        assert (fetched.place, fetched.blocks) == ("store", 18)
        assert fetched.waited_s == pytest.approx(0.01)
        engine.stored = 7
        fetched = await reader.fetch()
        assert fetched is not None
        assert (fetched.place, fetched.blocks) == ("store", 5)
        assert engine.wanted == ["18", "5"]
        # A new prompt: nothing is known of it.
        engine.stored, unknown = 0, outcome("no_copy")
        fetched = await reader.fetch()
        assert fetched is not None
        assert (fetched.blocks, outcome("no_copy")) == (0, unknown + 1)
        assert (await reader.fetch(held=20), engine.wanted) == (None, ["18", "5"])


async def test_a_store_that_is_slower_than_computing_is_not_used() -> None:
    clock = Clock()
    engine = Engine(clock)
    async with serving(engine) as http:
        reader = StoreReader(http, clock)
        engine.took_s = 60.0
        await reader.fetch()
        slow = outcome("slow")
        await reader.fetch()
        assert (engine.wanted, outcome("slow")) == (["18"], slow + 1)


async def test_a_fetch_keeps_to_the_quota_and_counts_against_it() -> None:
    clock = Clock()
    engine = Engine(clock)
    engine.took_s = 0.0
    async with serving(engine) as http:
        reader = StoreReader(http, clock, KvRateLimits(tenant=10_000))
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 10
        spent = outcome("quota")
        fetched = await reader.fetch()
        assert fetched is not None
        assert (fetched.blocks, outcome("quota")) == (0, spent + 1)
        # Another tenant has its own.
        other = KvUser(USER.deployment_id, "other")
        assert reader.quota.user_bytes(other, clock.now_s) == 10_000


async def test_a_fetch_leaves_time_to_compute_before_the_deadline() -> None:
    clock = Clock()
    engine = Engine(clock)
    async with serving(engine) as http:
        late = outcome("deadline")
        # 18 blocks of 16 tokens at 20 ms each.
        await StoreReader(http, clock).fetch(deadline_s=clock.now_s + 5.76)
        assert (engine.wanted, outcome("deadline")) == ([], late + 1)


async def test_a_store_that_hangs_or_fails_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    engine = Engine(clock)
    async with serving(engine) as http:
        reader = StoreReader(http, clock)
        engine.fails = True
        failed = outcome("failed")
        fetched = await reader.fetch()
        assert fetched is not None
        assert (fetched.blocks, outcome("failed")) == (0, failed + 1)
        assert (await reader.fetch(), len(engine.wanted)) == (None, 1)
        clock.now_s += BACKOFF_S
        engine.fails, engine.hangs = False, True
        monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MAX_S", 0.01)
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 0
        engine.hangs = False
        monkeypatch.undo()
        clock.now_s += BACKOFF_S
        assert await reader.fetch() is None, "the second failure in a row counts twice"
        clock.now_s += BACKOFF_S
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 18


async def test_a_store_that_fails_after_some_blocks_is_used_again_after_the_pause() -> None:
    """The time until it noticed that an engine is dead counted as that of the blocks before it."""
    clock = Clock()
    engine = Engine(clock)
    async with serving(engine) as http:
        reader = StoreReader(http, clock)
        engine.gives, engine.took_s = 1, 2.0
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 1
        engine.gives, engine.took_s = 20, 0.01
        clock.now_s += BACKOFF_S
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 18


@pytest.mark.parametrize("lost_at", [kv_sharing.STORE_LOCATE_PATH, kv_sharing.STORE_FETCH_PATH])
async def test_a_store_is_not_blamed_for_an_engine_that_is_lost(lost_at: str) -> None:
    clock = Clock()
    engine = Engine(clock)
    async with serving(engine) as http:
        reader = StoreReader(http, clock)
        engine.lost_at = lost_at
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 0
        engine.lost_at = ""
        fetched = await reader.fetch()
        assert fetched is not None
        assert fetched.blocks == 18


async def test_computed_prompts_are_stored_one_at_a_time_within_the_quota() -> None:
    clock = Clock()
    engine = Engine(clock)
    # Enough for one prompt; both copies of its blocks count.
    moved = STORE_COPIES * len(DIGESTS) * BLOCK_BYTES
    quota = KvQuota(KvRateLimits(deployment=moved))
    copies = StoreCopies(quota, clock)
    async with serving(engine) as http:
        prompt = PromptForStore(http, USER, DIGESTS)
        copies.offer(prompt._replace(digests=DIGESTS[: BLOCKS_MIN - 1]))
        copies.offer(prompt)
        await until("it is stored", lambda: settled(engine.kept == [20]), 60.0)
        await until("it is counted", lambda: settled(left(quota, clock) == 0), 60.0)
        copies.offer(prompt)
        clock.now_s += 1.0
        copies.offer(prompt)
        await until("the quota is back", lambda: settled(engine.kept == [20, 20]), 60.0)
        await copies.close()
    assert engine.kept == [20, 20]


async def test_nothing_is_stored_for_a_while_after_a_failure() -> None:
    clock = Clock()
    engine = Engine(clock)
    copies = StoreCopies(KvQuota(NO_KV_LIMITS), clock)
    async with serving(engine) as http:
        prompt = PromptForStore(http, USER, DIGESTS)
        failed = copies_made("failed")
        engine.fails = True
        copies.offer(prompt)
        await until("it failed", lambda: settled(copies_made("failed") > failed), 60.0)
        engine.fails, dropped = False, copies_made("dropped")
        copies.offer(prompt)
        assert copies_made("dropped") == dropped + 1
        await copies.close()
    assert engine.kept == []


def left(quota: KvQuota, clock: Clock) -> float:
    return quota.user_bytes(USER, clock.now_s)


def copies_made(outcome: str) -> float:
    return float(metrics.KV_COPIES.labels(outcome)._value.get())


async def settled(is_so: bool) -> bool:
    return is_so
