"""Fetches files of artifacts from other nodes, so that few nodes fetch them from the origin.

Rule 1: a peer is not trusted more than an origin. If a file fails verification, every peer that
sent a part of it is excluded for that artifact.
Rule 2: a peer cannot make this node wait without limit, follow a redirect, or store more than the
manifest allows.
Rule 3: of the nodes of a PoP that need an artifact, one fetches it from far away; the others wait
for that node while it makes progress.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from ssl import SSLContext
from typing import Final, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec

from isochrone.service.failure_log import error_text
from isochrone.service.trust.tls import node_url
from isochrone.wire.digits import parse_digits
from isochrone.wire.http import headers
from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.assignment import PeerSource
from nodeagent import metrics
from nodeagent.decide.bandwidth import MinimumRate
from nodeagent.host.artifacts.download import FileDownload, TransferCut, TransferTooLong

log = logging.getLogger(__name__)

READ_BYTES: Final = 1024 * 1024
NAMED_MAX: Final = 256
"""Artifacts whose holders requests have named, of which the latest are remembered."""


class PeerFetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long this node waits for other nodes.

    A peer that fails `tries` times gets no request for `retry_after_s`. A near peer that is still
    fetching is polled every `poll_interval_s`, given up after `stall_s` without progress, and after
    `near_wait_s` in any case.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    minimum_rate: MinimumRate = MinimumRate(bytes_per_s=256 * 1024, window_s=10.0)
    tries: int = 2
    retry_after_s: float = 120.0
    poll_interval_s: float = 1.0
    stall_s: float = 60.0
    near_wait_s: float = 3600.0


class PeerFetchOutcome(Enum):
    """The outcome of one request to a peer. LATER: it may have the file later."""

    WHOLE = "whole"
    LATER = "later"
    FAILED = "failed"


class _Failures(NamedTuple):
    """How often a peer failed for an artifact, and when last."""

    times: int
    last_s: float


class _FetchProgress(NamedTuple):
    """How many bytes a peer that is still fetching has, and since when."""

    fetched_bytes: int
    since_s: float


class PeerFetcher:
    """Fetches files from the nodes that `holders` names for a digest, nearest first."""

    def __init__(
        self,
        *,
        holders: Callable[[str], Sequence[PeerSource]],
        pop: PopId,
        context: SSLContext | None,
        clock: Callable[[], float],
        rng: random.Random,
        limits: PeerFetchLimits | None = None,
    ) -> None:
        """`context` holds this node's certificate, if the nodes use TLS."""
        self.limits = limits or PeerFetchLimits()
        self.clock = clock
        self.rng = rng
        self.context = context
        self._assigned_holders = holders
        self._named_holders: OrderedDict[str, Sequence[PeerSource]] = OrderedDict()
        self._pop = pop
        # By artifact: peers that sent wrong bytes are excluded until this agent restarts; peers
        # that failed are retried after a while.
        self._excluded: dict[str, set[NodeId]] = {}
        self._failures: dict[tuple[str, NodeId], _Failures] = {}

    def name_holders(self, digest: str, holders: Sequence[PeerSource]) -> None:
        """Use these nodes for an artifact that the assignment does not name."""
        if holders:
            self._named_holders[digest] = holders
            self._named_holders.move_to_end(digest)
        if len(self._named_holders) > NAMED_MAX:
            self._named_holders.popitem(last=False)

    def _holders(self, digest: str) -> Sequence[PeerSource]:
        return self._assigned_holders(digest) or self._named_holders.get(digest, ())

    async def fetch(self, download: FileDownload) -> bool:
        """Fetch and verify a file from peers; return False if they cannot provide it."""
        if not self._holders(download.digest):
            return False
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self.limits.connect_timeout_s,
            sock_read=self.limits.read_timeout_s,
        )
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http:
            return await _PeerFetch(self, http, download).run()

    def near_peers(self, digest: str) -> list[PeerSource]:
        """Return the usable peers of this PoP, including those that are still fetching."""
        return [p for p in self._usable(digest) if not self.is_far(p)]

    def far_peers(self, digest: str) -> list[PeerSource]:
        """Return the usable peers of other PoPs that hold the artifact."""
        return [p for p in self._usable(digest) if self.is_far(p) and p.holds]

    def record_failure(self, digest: str, peer: NodeId) -> None:
        """Count a failure that may pass."""
        failures = self._failures.get((digest, peer))
        times = failures.times if failures else 0
        self._failures[digest, peer] = _Failures(times + 1, self.clock())

    def exclude(self, digest: str, peers: set[NodeId], reason: str) -> None:
        """Stop using these peers for this artifact."""
        self._excluded.setdefault(digest, set()).update(peers)
        log.warning(
            "peers excluded",
            extra={"fields": {"digest": digest, "peers": sorted(peers), "reason": reason}},
        )

    def is_far(self, peer: PeerSource) -> bool:
        """Return True if a peer is in another PoP."""
        return peer.pop != self._pop

    def _usable(self, digest: str) -> list[PeerSource]:
        return [peer for peer in self._holders(digest) if self._is_usable(digest, peer.node_id)]

    def _is_usable(self, digest: str, peer: NodeId) -> bool:
        if peer in self._excluded.get(digest, ()):
            return False
        failures = self._failures.get((digest, peer))
        if failures is None:
            return True
        if self.clock() - failures.last_s > self.limits.retry_after_s:
            del self._failures[digest, peer]
            return True
        return failures.times < self.limits.tries


class _PeerFetch:
    """The fetch of one file: its senders so far, and the progress of the peers it waits for."""

    def __init__(
        self, peers: PeerFetcher, http: aiohttp.ClientSession, download: FileDownload
    ) -> None:
        self._peers = peers
        self._http = http
        self._download = download
        self._senders: set[NodeId] = set()
        self._resumes_unknown = False
        """True if the file resumes bytes of an earlier fetch, whose senders are not known."""
        self._start_s = peers.clock()
        self._progress: dict[NodeId, _FetchProgress] = {}

    async def run(self) -> bool:
        """Ask near peers for as long as one of them makes progress, then far ones."""
        limits = self._peers.limits
        digest = self._download.digest
        while True:
            outcome = await self._ask_each(self._peers.near_peers(digest))
            if outcome is not PeerFetchOutcome.LATER:
                break
            await asyncio.sleep(limits.poll_interval_s * self._peers.rng.uniform(0.5, 1.5))
        for _ in range(limits.tries):
            if outcome is PeerFetchOutcome.WHOLE:
                return True
            outcome = await self._ask_each(self._peers.far_peers(digest))
        return outcome is PeerFetchOutcome.WHOLE

    async def _ask_each(self, peers: Sequence[PeerSource]) -> PeerFetchOutcome:
        """Ask peers in turn until the file is complete; LATER if one may have it later."""
        best = PeerFetchOutcome.FAILED
        for peer in peers:
            outcome = await self._ask(peer)
            metrics.PEER_FETCHES.labels(outcome.value).inc()
            if outcome is PeerFetchOutcome.WHOLE:
                return outcome
            if outcome is PeerFetchOutcome.LATER:
                best = outcome
        return best

    async def _ask(self, peer: PeerSource) -> PeerFetchOutcome:
        """Fetch from a peer. A failed peer may be retried; one that sends too much is excluded."""
        digest = self._download.digest
        try:
            return await self._receive(peer)
        except TransferTooLong as error:
            self._peers.exclude(digest, {peer.node_id}, str(error))
            return PeerFetchOutcome.FAILED
        # Any other OSError is of this node's disk and would follow from the origin too.
        except (TransferCut, aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self._peers.record_failure(digest, peer.node_id)
            reason = error_text(error)
            log.info("peer failed", extra={"fields": {"peer": peer.node_id, "reason": reason}})
            return PeerFetchOutcome.LATER

    async def _receive(self, peer: PeerSource) -> PeerFetchOutcome:
        """Receive the rest of the file; WHOLE if it is then complete and verified."""
        download = self._download
        offset = download.partial_bytes()
        sent = {"accept-encoding": "identity"}
        if offset:
            sent["range"] = f"bytes={offset}-"
        url = node_url(peer.address, self._peers.context)
        async with self._http.get(
            f"{url}/v1/artifacts/{download.digest}/{quote(download.file.path)}",
            headers=sent,
            allow_redirects=False,
            server_hostname=peer.node_id,
            ssl=self._peers.context or True,
        ) as response:
            if response.status in (429, 503):
                return self._wait_or_give_up(peer, response)
            if response.status not in (200, 206):
                raise TransferCut(f"the node answered {response.status}")
            starts_there = response.headers.get("content-range", "").startswith(f"bytes {offset}-")
            if response.status == 206 and not starts_there:
                raise TransferCut("the node sent another range than the requested one")
            if response.status == 200:
                offset = 0
                self._senders.clear()
            self._resumes_unknown = offset > 0 and (self._resumes_unknown or not self._senders)
            self._senders.add(peer.node_id)
            problem = await download.append(
                response.content.iter_chunked(READ_BYTES),
                offset,
                self._peers.limits.minimum_rate,
                is_far=self._peers.is_far(peer),
            )
        if not problem:
            return PeerFetchOutcome.WHOLE
        senders, self._senders = self._senders, set()
        if self._resumes_unknown:
            raise TransferCut(f"the bytes of an earlier fetch may be corrupt: {problem}")
        # Any of the senders may have sent the wrong bytes.
        self._peers.exclude(download.digest, senders, problem)
        return PeerFetchOutcome.FAILED

    def _wait_or_give_up(
        self, peer: PeerSource, response: aiohttp.ClientResponse
    ) -> PeerFetchOutcome:
        """Return LATER while a peer that is busy or still fetching makes progress, else FAILED."""
        now = self._peers.clock()
        limits = self._peers.limits
        is_busy = response.status == 429
        fetched_bytes = parse_digits(response.headers.get(headers.FETCHED_BYTES, ""), 15) or 0
        before = self._progress.get(peer.node_id, _FetchProgress(-1, now))
        since_s = now if is_busy or fetched_bytes > before.fetched_bytes else before.since_s
        most_bytes = max(before.fetched_bytes, fetched_bytes)
        self._progress[peer.node_id] = _FetchProgress(most_bytes, since_s)
        if now - since_s < limits.stall_s and now - self._start_s < limits.near_wait_s:
            return PeerFetchOutcome.LATER
        return PeerFetchOutcome.FAILED
