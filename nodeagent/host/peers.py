"""Weights from other nodes: the nearest that holds them, and the origin only where none does.

Rule 1: a peer is believed no more than an origin: its bytes count as an artifact when they have the
manifest's SHA-256, and where they have not, every peer that gave some of them is asked no more.
Rule 2: a peer cannot make us wait, follow, or store more than the manifest says.
Rule 3: of the nodes of one PoP that want the same artifact, one fetches it from afar; the others
wait for that one, as long as it gets on.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from enum import Enum
from ssl import SSLContext
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec

from isochrone.service.tls import node_url
from isochrone.wire import headers
from isochrone.wire.assignment import PeerSource
from isochrone.wire.ids import NodeId, PopId
from nodeagent import metrics
from nodeagent.decide.bandwidth import Pace
from nodeagent.host.wanted import Cut, TooLong, Wanted

log = logging.getLogger(__name__)

READ_BYTES: Final = 1024 * 1024


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much patience a peer gets."""

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    pace: Pace = Pace(least_bytes_per_s=256 * 1024, window_s=10.0)
    tries: int = 2
    forgive_after_s: float = 120.0
    look_s: float = 1.0
    stall_s: float = 60.0
    near_wait_s: float = 3600.0


class Asked(Enum):
    """What asking one peer came to."""

    WHOLE = "whole"
    LATER = "later"
    FAILED = "failed"


class Peers:
    """Fetches files that other nodes hold. `holders` names them by digest, the nearest first."""

    def __init__(
        self,
        *,
        holders: Callable[[str], Sequence[PeerSource]],
        pop: PopId,
        context: SSLContext | None,
        clock: Callable[[], float],
        chance: random.Random,
        limits: PeerLimits | None = None,
    ) -> None:
        """`context` shows our certificate to peers that serve TLS."""
        self.limits = limits or PeerLimits()
        self.clock = clock
        self.chance = chance
        self.context = context
        self._holders = holders
        self._pop = pop
        # By artifact: a peer that lied about one is not asked for it again in this life; one that
        # failed is given time.
        self._shunned: dict[str, set[NodeId]] = {}
        self._failures: dict[tuple[str, NodeId], tuple[int, float]] = {}

    async def fetch(self, wanted: Wanted) -> bool:
        """Put the file together from peers, verified; False where they cannot give it."""
        if not self._holders(wanted.digest):
            return False
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self.limits.connect_timeout_s,
            sock_read=self.limits.read_timeout_s,
        )
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http:
            return await _Fetch(self, http, wanted).run()

    def candidates(self, digest: str) -> tuple[list[PeerSource], list[PeerSource]]:
        """Return who may be asked now, those of our own PoP apart from those far away."""
        asked = [peer for peer in self._holders(digest) if self._may_ask(digest, peer.node_id)]
        near = [peer for peer in asked if not self.is_far(peer)]
        return near, [peer for peer in asked if self.is_far(peer) and peer.holds]

    def failed(self, digest: str, peer: NodeId) -> None:
        """Note a failure that may pass."""
        count, _ = self._failures.get((digest, peer), (0, 0.0))
        self._failures[digest, peer] = (count + 1, self.clock())

    def shun(self, digest: str, peers: set[NodeId], reason: str) -> None:
        """Ask these peers for this artifact no more."""
        self._shunned.setdefault(digest, set()).update(peers)
        log.warning(
            "peers asked no more",
            extra={"fields": {"digest": digest, "peers": sorted(peers), "reason": reason}},
        )

    def is_far(self, peer: PeerSource) -> bool:
        """Say whether a peer is in another PoP."""
        return peer.pop != self._pop

    def _may_ask(self, digest: str, peer: NodeId) -> bool:
        if peer in self._shunned.get(digest, ()):
            return False
        count, at = self._failures.get((digest, peer), (0, 0.0))
        if count and self.clock() - at > self.limits.forgive_after_s:
            del self._failures[digest, peer]
            return True
        return count < self.limits.tries


class _Fetch:
    """One file on its way: who gave a part of it, and how far those are that we wait for."""

    def __init__(self, peers: Peers, http: aiohttp.ClientSession, wanted: Wanted) -> None:
        self._peers = peers
        self._http = http
        self._wanted = wanted
        self._givers: set[NodeId] = set()
        self._goes_on = False
        """Whether it goes on from bytes that an earlier fetch left: of those nobody is known."""
        self._began = peers.clock()
        self._progress: dict[NodeId, tuple[int, float]] = {}

    async def run(self) -> bool:
        """Ask near peers for as long as one of them is worth waiting for, then far ones."""
        limits = self._peers.limits
        while True:
            near, _ = self._peers.candidates(self._wanted.digest)
            answer = await self._ask_each(near)
            if answer is not Asked.LATER:
                break
            await asyncio.sleep(limits.look_s * self._peers.chance.uniform(0.5, 1.5))
        for _ in range(limits.tries):
            if answer is Asked.WHOLE:
                return True
            _, far = self._peers.candidates(self._wanted.digest)
            answer = await self._ask_each(far)
        return answer is Asked.WHOLE

    async def _ask_each(self, peers: Sequence[PeerSource]) -> Asked:
        """Ask in turn until the file is whole; LATER if one of them may still give it."""
        best = Asked.FAILED
        for peer in peers:
            answer = await self._ask(peer)
            metrics.PEER_FETCHES.labels(answer.value).inc()
            if answer is Asked.WHOLE:
                return answer
            if answer is Asked.LATER:
                best = answer
        return best

    async def _ask(self, peer: PeerSource) -> Asked:
        """Ask one peer; what fails may come later, what lies never."""
        digest = self._wanted.digest
        try:
            return await self._read(peer)
        except TooLong as error:
            self._peers.shun(digest, {peer.node_id}, str(error))
            return Asked.FAILED
        # Any other OSError is of this node's disk: no peer can mend that, nor the origin.
        except (Cut, aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self._peers.failed(digest, peer.node_id)
            reason = str(error) or type(error).__name__
            log.info("peer failed", extra={"fields": {"peer": peer.node_id, "reason": reason}})
            return Asked.LATER

    async def _read(self, peer: PeerSource) -> Asked:
        """Read from where we are to the end; WHOLE where the file is then right."""
        wanted = self._wanted
        offset = wanted.held_bytes()
        sent = {"accept-encoding": "identity"}
        if offset:
            sent["range"] = f"bytes={offset}-"
        door = node_url(peer.address, self._peers.context)
        async with self._http.get(
            f"{door}/v1/artifacts/{wanted.digest}/{quote(wanted.file.path)}",
            headers=sent,
            allow_redirects=False,
            server_hostname=peer.node_id,
            ssl=self._peers.context or True,
        ) as response:
            if response.status in (429, 503):
                return self._may_come(peer, response)
            if response.status not in (200, 206):
                raise Cut(f"it answered {response.status}")
            starts = response.headers.get("content-range", "").startswith(f"bytes {offset}-")
            if response.status == 206 and not starts:
                raise Cut("it sent another part than was asked for")
            if response.status == 200:
                offset = 0
                self._givers.clear()
            self._goes_on = offset > 0 and (self._goes_on or not self._givers)
            self._givers.add(peer.node_id)
            problem = await wanted.append(
                response.content.iter_chunked(READ_BYTES),
                offset,
                self._peers.limits.pace,
                is_far=self._peers.is_far(peer),
            )
        if not problem:
            return Asked.WHOLE
        givers, self._givers = self._givers, set()
        if self._goes_on:
            raise Cut(f"what was here may have been spoilt: {problem}")
        # Whoever gave a part of it may have been the one; the bytes are worth nothing.
        self._peers.shun(wanted.digest, givers, problem)
        return Asked.FAILED

    def _may_come(self, peer: PeerSource, response: aiohttp.ClientResponse) -> Asked:
        """Judge a peer that is busy, or is itself still fetching: LATER while it gets on."""
        now = self._peers.clock()
        limits = self._peers.limits
        told = response.headers.get(headers.FETCHED_BYTES, "")
        is_busy = response.status == 429
        fetched_bytes = int(told) if told.isascii() and told.isdigit() and len(told) < 16 else 0
        before, at = self._progress.get(peer.node_id, (-1, now))
        if fetched_bytes > before or is_busy:
            at = now
        self._progress[peer.node_id] = (max(before, fetched_bytes), at)
        if now - at < limits.stall_s and now - self._began < limits.near_wait_s:
            return Asked.LATER
        return Asked.FAILED
