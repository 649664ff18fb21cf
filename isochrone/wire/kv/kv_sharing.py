"""KV blocks that the replicas of a PoP share: located, fetched and kept by their digests.

All nodes of a cluster derive a tenant's cache salt from one secret, so the digest of a block, a
chain over the salt and all tokens up to its end, is the same in every engine of the deployment. A
peer that does not know the salt and the tokens cannot name a block.

The routers name replicas of the PoP that may have a prompt's prefix (KV_HOLDERS) and the one that
keeps a copy of it (KV_KEEPER). The node that answers asks each holder how much it has
(LOCATE_PATH), and fetches it (BLOCKS_PATH) if that is faster than computing it. After the answer it
asks the keeper's node to fetch the blocks that it lacks (KEEP_PATH). Nodes and embedded engines
both have these paths. An engine's KEEP_PATH takes the blocks themselves.
"""

from typing import Annotated, Final

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.kv.kv_transfer import Count

KV_HOLDERS: Final = "x-isochrone-kv-holders"
"""Router to node: the addressed replica, then those of its PoP that may have the prefix."""

KV_KEEPER: Final = "x-isochrone-kv-store"
"""Router to node: the one of KV_HOLDERS that keeps a copy of the prefix. The name on the wire is
older than the PoP's store of KV (STORE_LOCATE_PATH), which is something else."""

KV_FOUND: Final = "x-isochrone-kv-found"
"""Engine to node to router: the prompt's tokens that were cached, by the place they were in."""

COPY: Final = "x-isochrone-kv-copy"
"""Node to node to engine: the blocks are for a copy. Without it they move: a request will use them
at the other replica, so that here they are evicted before others."""

FETCH_MS: Final = "x-isochrone-kv-fetch-ms"
"""Node to router: how long the request waited for a prefix of other replicas, in vain or not."""

DIGEST_COUNT: Final = "x-isochrone-kv-digests"
"""Node to its engine: how many digests precede the blocks in the body."""

LOCATE_PATH: Final = "/kv/locate"
BLOCKS_PATH: Final = "/kv/blocks"
KEEP_PATH: Final = "/kv/keep"

STORE_LOCATE_PATH: Final = "/kv/store/locate"
STORE_KEEP_PATH: Final = "/kv/store/keep"
STORE_FETCH_PATH: Final = "/kv/store/fetch/"
"""Node to its engine: how much of a chain the PoP's store has; have the store keep a chain; and
fetch the next `?blocks=N` of the prompt that waits for a transfer, whose id follows."""

DIGEST_BYTES: Final = 32
CHAIN_BLOCKS_MAX: Final = 16_384
"""Blocks of one query: 262,144 tokens, in half a megabyte."""

QUERY_BYTES_MAX: Final = 1024 * 1024

PLACES: Final = ("device", "host", "file", "peer", "store")
"""The places of cached tokens: the tiers of the engine, another replica, a replica's copy or
the PoP's store."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Chain = Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=CHAIN_BLOCKS_MAX)]


class BlockQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the longest prefix of a chain of blocks that an engine has."""

    digests: Chain


class LocatedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The number of blocks of a chain's prefix that an engine has, and the size of one.

    `keep_blocks_max` more can be kept without evicting others; -1 if the engine does not say.
    `kv_format` is that of ExpectedPrompt.
    """

    blocks: Count
    block_bytes: Count
    keep_blocks_max: int = -1
    kv_format: str = ""


class KeepQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a node to keep a copy of blocks that `source` has."""

    source: PeerReplica
    digests: Chain


class FoundTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The cached tokens of one prompt, by place."""

    device: int = 0
    host: int = 0
    file: int = 0
    peer: int = 0
    store: int = 0

    def moved(self, place: str, tokens: int) -> "FoundTokens":
        """Return the same tokens, with `tokens` of them counted at `place`, from which they came.

        The engine found them in its host memory, where they were stored on arrival, or on its
        device if it has no tier in host memory.
        """
        from_host = min(tokens, self.host)
        from_device = min(tokens - from_host, self.device)
        counts = msgspec.structs.asdict(self)
        counts["host"] -= from_host
        counts["device"] -= from_device
        counts[place] += from_host + from_device
        return FoundTokens(**counts)

    def limited(self, tokens: int) -> "FoundTokens":
        """Return at most `tokens`, without the last ones that the device has."""
        beyond = max(0, self.device + self.host + self.file + self.peer + self.store - tokens)
        return msgspec.structs.replace(self, device=max(0, self.device - beyond))


def format_found(found: FoundTokens) -> str:
    """Format as a header value: `device=160;peer=320`; empty if nothing was cached."""
    return ";".join(f"{place}={tokens}" for place, tokens in found_places(found))


def found_places(found: FoundTokens) -> list[tuple[str, int]]:
    """Return the places where tokens were found, and how many."""
    counts = msgspec.structs.asdict(found)
    return [(place, counts[place]) for place in PLACES if counts[place]]


def parse_found(value: str) -> FoundTokens:
    """Parse a header value; skip what is malformed."""
    counts: dict[str, int] = dict.fromkeys(PLACES, 0)
    for part in value.split(";", len(PLACES))[: len(PLACES)]:
        place, _, number = part.partition("=")
        if place in counts and (tokens := parse_digits(number)) is not None:
            counts[place] = tokens
    return FoundTokens(**counts)
