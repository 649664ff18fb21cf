"""Which nodes hold which artifacts, and from which of them another node should fetch."""

from collections.abc import Sequence
from typing import Final

from isochrone.wire.geo import round_trip_ms
from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.assignment import ArtifactHolders
from scheduler.decide.routing import ArtifactHolder, rank_sources
from scheduler.store.pool import Connection, as_struct

SILENT_MAX_S: Final = 30.0
CANDIDATES_MAX: Final = 200
UNKNOWN_DISTANCE_MS: Final = 1_000.0


async def record_artifacts(connection: Connection, node_id: NodeId, digests: Sequence[str]) -> None:
    """Store the artifacts that a node reports, writing only the differences."""
    await connection.execute(
        "DELETE FROM artifact_holder WHERE node_id = $1 AND digest <> ALL($2::text[])",
        node_id,
        list(digests),
    )
    await connection.execute(
        """
        INSERT INTO artifact_holder (node_id, digest) SELECT $1, unnest($2::text[])
        ON CONFLICT DO NOTHING
        """,
        node_id,
        list(digests),
    )


async def read_holders(
    connection: Connection, node_id: NodeId, digests: Sequence[str]
) -> tuple[ArtifactHolders, ...]:
    """Return the nodes to fetch each artifact from that this node does not hold itself."""
    held = await connection.fetch("SELECT digest FROM artifact_holder WHERE node_id = $1", node_id)
    missing = sorted(set(digests) - {row["digest"] for row in held})
    if not missing:
        return ()
    pop = PopId(await connection.fetchval("SELECT pop FROM node WHERE node_id = $1", node_id))
    distance_ms = await _round_trips(connection, pop)
    holders = []
    for digest in missing:
        candidates = await _candidates(connection, node_id, pop, digest)
        peers = rank_sources(
            node_id, pop, candidates, lambda p: distance_ms.get(p, UNKNOWN_DISTANCE_MS)
        )
        if peers:
            holders.append(ArtifactHolders(digest=digest, peers=peers))
    return tuple(holders)


async def _candidates(
    connection: Connection, node_id: NodeId, pop: PopId, digest: str
) -> list[ArtifactHolder]:
    """Return live nodes that hold the artifact, and nodes of this PoP that are about to fetch it.

    At most CANDIDATES_MAX of each: a popular model is everywhere. Holders of this PoP come first,
    then one or two of each other PoP.
    """
    rows = await connection.fetch(
        """
        WITH living AS (
            SELECT node_id, pop, address FROM node
            WHERE NOT revoked AND NOT draining AND address <> '' AND node_id <> $1
              AND last_seen_at > clock_timestamp() - make_interval(secs => $4)
        ), holding AS (
            SELECT living.*, true AS holds,
                   row_number() OVER (PARTITION BY pop ORDER BY node_id) AS turn
            FROM living JOIN artifact_holder USING (node_id) WHERE digest = $2
        ), fetching AS (
            SELECT DISTINCT living.*, false AS holds
            FROM living JOIN placement USING (node_id)
            WHERE pop = $3 AND ended_at IS NULL AND released_at IS NULL
              AND state IN ('wanted', 'fetching') AND spec->'artifact'->>'digest' = $2
              AND node_id NOT IN (SELECT node_id FROM holding)
        )
        (SELECT node_id, pop, address, holds FROM holding
            WHERE pop = $3 OR turn <= 2 ORDER BY pop <> $3, turn LIMIT $5)
        UNION ALL
        (SELECT node_id, pop, address, holds FROM fetching ORDER BY node_id LIMIT $5)
        """,
        node_id,
        digest,
        pop,
        SILENT_MAX_S,
        CANDIDATES_MAX,
    )
    return [as_struct(row, ArtifactHolder) for row in rows]


async def _round_trips(connection: Connection, pop: PopId) -> dict[PopId, float]:
    """Return the round trip to each PoP: as this PoP's routers measured it, else by distance."""
    pops = await connection.fetch("SELECT pop, latitude, longitude FROM pop")
    own = next(row for row in pops if row["pop"] == pop)
    distance_ms = {
        PopId(row["pop"]): round_trip_ms(
            own["latitude"], own["longitude"], row["latitude"], row["longitude"]
        )
        for row in pops
    }
    measured = await connection.fetch(
        """
        SELECT n.pop, min(rtt_ms) AS rtt_ms FROM round_trip r JOIN node n USING (node_id)
        WHERE r.pop = $1 AND measured_at > clock_timestamp() - interval '1 hour' GROUP BY n.pop
        """,
        pop,
    )
    return distance_ms | {PopId(row["pop"]): row["rtt_ms"] for row in measured}
