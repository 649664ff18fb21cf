"""Reads the cluster's state for decisions.

`read_cluster` reads all that the planner needs. `read_fleet` leaves out what only placement needs:
demand, distances, prefetches and start failures. `read_fleet_nodes` reads some nodes again. A row
that cannot be read is reported and does not affect others (`readable_rows.py`). Rows of the other
tables have no form that Postgres accepts and this release does not.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import asyncpg
import msgspec

from isochrone.wire.ids import ClusterId, DeploymentId, Generation, NodeId, ReplicaId
from isochrone.wire.models.model import CatalogModel, Deployment, EngineSettings, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaProfile, ReplicaState, Report
from isochrone.wire.peers.routes import Pop
from scheduler.decide.cluster import (
    ClusterState,
    DemandRate,
    MeasuredProfile,
    Placement,
    PopDistance,
    StartFailures,
)
from scheduler.decide.demand import RouterSilence, held_silences, raise_to_last_known
from scheduler.decide.membership import NodeContact
from scheduler.store.deployments import read_deprecation
from scheduler.store.fleet.node_reports import NodeReportCache, read_nodes
from scheduler.store.fleet.prefetch import read_prefetches
from scheduler.store.pool import Connection, as_struct, fetch_one
from scheduler.store.readable_rows import RowReader
from scheduler.store.rollouts import active_rollouts

GIVEN_UP_FOR_S: Final = 3600.0
"""For how long a failed replica counts against its version and its node."""


DEMAND_GAP_MAX_S: Final = 120.0
"""If routers could report nothing for longer before a term, the demand of the last ten minutes is
far too low until they have reported again."""

DEMAND_WAIT_S: Final = 60.0
"""The time from the beginning of a term until all routers have connected and reported."""


async def read_cluster(
    connection: Connection, contact: NodeContact, reports: NodeReportCache | None = None
) -> ClusterState:
    """Return the cluster's state. The connection must be in a REPEATABLE READ transaction."""
    fleet = await read_fleet(connection, contact, reports)
    return msgspec.structs.replace(
        fleet,
        demand=raise_to_last_known(
            await _read_demand(connection),
            await _read_last_demand(connection, held_silences(await _read_silences(connection))),
        ),
        is_demand_known=await _is_demand_known(connection, contact.acting_for_s),
        distances=await _read_distances(connection),
        prefetches=await read_prefetches(connection),
        given_up=await _read_given_up(connection),
    )


async def read_fleet(
    connection: Connection, contact: NodeContact, reports: NodeReportCache | None = None
) -> ClusterState:
    """Return PoPs, nodes, models, deployments, placements, profiles and rollouts.

    The silence of nodes that this process has not heard is taken from the store, which lags. Pass
    the same `reports` to each call: only changed reports are read and decoded again.
    """
    reports = reports or NodeReportCache()
    reader = RowReader(reports.last_readable)
    row = await fetch_one(connection, "SELECT cluster_id, generation FROM cluster")
    by_node, nodes = await read_nodes(connection, contact, reports)
    reports.note_unreadable(reader)
    deployments, deleted = await _read_deployments(connection, reader)
    return ClusterState(
        cluster_id=ClusterId(row["cluster_id"]),
        generation=Generation(row["generation"]),
        acting_for_s=contact.acting_for_s,
        pops=await read_pops(connection),
        nodes=nodes,
        models=reader.read_table(
            "model",
            await connection.fetch("SELECT model_id, spec FROM model ORDER BY model_id"),
            lambda row: msgspec.json.decode(row["spec"], type=CatalogModel),
            name="model_id",
        ),
        deployments=deployments,
        deleted=deleted,
        placements=await _read_placements(connection, reader, by_node),
        profiles=await _read_profiles(connection),
        rollouts=await active_rollouts(connection, reader),
        unreadable=reader.finish("fleet"),
    )


async def read_fleet_nodes(
    connection: Connection,
    fleet: ClusterState,
    node_ids: Sequence[NodeId],
    contact: NodeContact,
    reports: NodeReportCache,
) -> ClusterState:
    """Return `fleet` with only these nodes and their placements, read now."""
    by_node, nodes = await read_nodes(connection, contact, reports, node_ids)
    placements = await _read_placements(connection, RowReader(), by_node, node_ids)
    return msgspec.structs.replace(
        fleet, acting_for_s=contact.acting_for_s, nodes=nodes, placements=placements
    )


async def read_pops(connection: Connection) -> tuple[Pop, ...]:
    """Return every PoP."""
    rows = await connection.fetch(
        "SELECT pop, city, country, latitude, longitude FROM pop ORDER BY pop"
    )
    return tuple(as_struct(row, Pop) for row in rows)


async def _read_deployments(
    connection: Connection, reader: RowReader
) -> tuple[tuple[Deployment, ...], tuple[DeploymentId, ...]]:
    rows = await connection.fetch(
        """
        SELECT deployment_id, name, model_id, version, engine, policy, deprecation, deleted_at,
            extract(epoch FROM created_at)::bigint AS created_at
        FROM deployment ORDER BY deployment_id
        """
    )
    live = reader.read_table(
        "deployment",
        [row for row in rows if row["deleted_at"] is None],
        _deployment,
        name="deployment_id",
        deployment="deployment_id",
    )
    deleted = tuple(DeploymentId(row["deployment_id"]) for row in rows if row["deleted_at"])
    return live, deleted


def _deployment(row: asyncpg.Record) -> Deployment:
    return as_struct(
        row,
        Deployment,
        engine=msgspec.json.decode(row["engine"], type=EngineSettings),
        policy=msgspec.json.decode(row["policy"], type=PlacementPolicy),
        deprecation=read_deprecation(row["deprecation"]),
    )


async def _read_placements(
    connection: Connection,
    reader: RowReader,
    reports: Mapping[NodeId, Report],
    node_ids: Sequence[NodeId] | None = None,
) -> tuple[Placement, ...]:
    rows = await connection.fetch(
        """
        SELECT p.replica_id, deployment_id, version, p.node_id, role, p.memory_bytes, reason, state,
               -- Not cast here: a value that cannot be cast would fail the whole statement.
               spec->'engine'->>'tokens_in_flight_max' AS tokens_in_flight_max,
               spec->>'overcommit' AS overcommit, spec->>'extra_bytes' AS extra_bytes,
               state_reason, restarts, ended_at IS NOT NULL AS is_ending,
               coalesce(leader_id, '') AS leader_id, coalesce(rank_port, 0) AS rank_port,
               greatest(0, extract(epoch FROM clock_timestamp() - state_since))::float8
                   AS state_age_s,
               greatest(0, extract(epoch FROM clock_timestamp() - placed_at))::float8 AS age_s,
               array_remove(array_agg(pd.device_id ORDER BY pd.device_id), NULL) AS device_ids
        FROM placement p LEFT JOIN placement_device pd USING (replica_id)
        WHERE released_at IS NULL AND ($1::text[] IS NULL OR p.node_id = ANY($1))
        GROUP BY p.replica_id ORDER BY p.replica_id
        """,
        node_ids,
    )
    profiles = {
        replica.spec.replica_id: replica.profile
        for report in reports.values()
        for replica in report.replicas
    }
    placements = []
    for row in rows:
        profile = profiles.get(row["replica_id"], ReplicaProfile())
        try:
            placements.append(_placement(row, profile))
        except ValueError as error:
            reader.note("placement", row["replica_id"], error, row["deployment_id"])
            placements.append(_unreadable_placement(row, profile))
    return _with_followers(placements)


def _placement(row: asyncpg.Record, profile: ReplicaProfile) -> Placement:
    return as_struct(
        row,
        Placement,
        tokens_in_flight_max=int(row["tokens_in_flight_max"] or 0),
        overcommit=float(row["overcommit"] or 1),
        extra_bytes=int(row["extra_bytes"] or 0),
        profile=profile,
    )


def _unreadable_placement(row: asyncpg.Record, profile: ReplicaProfile) -> Placement:
    """Return the known part of a placement whose row cannot be read: it keeps its memory.

    It keeps its routes, too, unless its role cannot be read.
    """
    is_role = row["role"] in {role.value for role in Role}
    return as_struct(
        row,
        Placement,
        role=row["role"] if is_role else Role.UNIFIED,
        state=row["state"] if is_role else ReplicaState.WANTED,
        tokens_in_flight_max=0,
        overcommit=1.0,
        extra_bytes=0,
        profile=profile,
    )


def _with_followers(parts: Iterable[Placement]) -> tuple[Placement, ...]:
    """Attach the parts of multi-node replicas to their leaders; orphaned parts stay separate."""
    leaders = {part.replica_id: part for part in parts}
    followers: dict[ReplicaId, list[Placement]] = defaultdict(list)
    for part in list(leaders.values()):
        if part.leader_id in leaders:
            followers[part.leader_id].append(leaders.pop(part.replica_id))
    return tuple(
        msgspec.structs.replace(leader, followers=tuple(followers[leader.replica_id]))
        if leader.replica_id in followers
        else leader
        for leader in leaders.values()
    )


async def _read_demand(connection: Connection) -> tuple[DemandRate, ...]:
    """Return demand rates: the higher of the last one to two minutes and the last ten.

    The short window follows growing demand quickly; the long one bridges short pauses.
    """
    rows = await connection.fetch(
        """
        WITH span (minutes) AS (VALUES (1), (10)),
        started AS (
            SELECT minutes, date_trunc('minute', clock_timestamp()) - make_interval(mins => minutes)
                AS since, clock_timestamp() AS until FROM span
        ),
        summed AS (
            SELECT minutes, deployment_id, pop,
                   extract(epoch FROM clock_timestamp() - since)::float8 AS span_s,
                   sum(greatest(requests - refused, 0))::float8 AS answered,
                   -- Includes the tokens of refused requests; scale them to the answered ones.
                   sum(uncached_tokens::float8 * greatest(requests - refused, 0)
                       / greatest(requests, 1)) AS uncached,
                   sum(output_tokens)::float8 AS output, sum(refused)::float8 AS refused
            -- Leaves out minutes in the future, counted before the clock was set back.
            FROM started JOIN demand ON minute BETWEEN since AND until
            GROUP BY minutes, since, deployment_id, pop
        )
        SELECT deployment_id, pop, max(answered / span_s) AS requests_per_s,
               max(uncached / span_s) AS uncached_tokens_per_s,
               max(output / span_s) AS output_tokens_per_s, max(refused / span_s) AS refused_per_s
        FROM summed GROUP BY deployment_id, pop ORDER BY deployment_id, pop
        """
    )
    return tuple(as_struct(row, DemandRate) for row in rows)


async def _read_silences(connection: Connection) -> list[RouterSilence]:
    """Return for how long no scheduler has heard each router."""
    rows = await connection.fetch(
        """
        SELECT pop, extract(epoch FROM clock_timestamp() - last_seen_at)::float8 AS silent_s
        FROM router WHERE NOT revoked AND last_seen_at IS NOT NULL
        """
    )
    return [RouterSilence(*row) for row in rows]


async def _read_last_demand(
    connection: Connection, silences: Sequence[RouterSilence]
) -> tuple[DemandRate, ...]:
    """Return the average demand of PoPs in the ten minutes before a router there fell silent."""
    if not silences:
        return ()
    rows = await connection.fetch(
        """
        SELECT deployment_id, silent.pop, answered / 600 AS requests_per_s,
               uncached / 600 AS uncached_tokens_per_s, output / 600 AS output_tokens_per_s,
               refused / 600 AS refused_per_s
        FROM (
            SELECT DISTINCT pop,
                date_trunc('minute', clock_timestamp() - make_interval(secs => silent_s)) AS until
            FROM unnest($1::text[], $2::float8[]) AS given (pop, silent_s)
        ) AS silent
        CROSS JOIN LATERAL (
            SELECT deployment_id, sum(greatest(requests - refused, 0))::float8 AS answered,
                   sum(uncached_tokens::float8 * greatest(requests - refused, 0)
                       / greatest(requests, 1)) AS uncached,
                   sum(output_tokens)::float8 AS output, sum(refused)::float8 AS refused
            FROM demand d WHERE d.pop = silent.pop
                AND minute >= until - interval '10 min' AND minute < until
            GROUP BY deployment_id
        ) AS summed
        """,
        [row.pop for row in silences],
        [row.silent_s for row in silences],
    )
    return tuple(as_struct(row, DemandRate) for row in rows)


async def _is_demand_known(connection: Connection, acting_for_s: float) -> bool:
    """Return False at the beginning of a term before which no scheduler heard routers for long."""
    if acting_for_s >= DEMAND_WAIT_S:
        return True
    gap_s: float | None = await connection.fetchval(
        """
        SELECT extract(epoch FROM now() - make_interval(secs => $1) - max(seen_at))::float8
        FROM demand_seen WHERE seen_at < now() - make_interval(secs => $1)
        """,
        acting_for_s,
    )
    return gap_s is None or gap_s <= DEMAND_GAP_MAX_S


async def _read_given_up(connection: Connection) -> tuple[StartFailures, ...]:
    """Return versions whose replicas failed after restarts; refused replicas never ran."""
    rows = await connection.fetch(
        """
        SELECT deployment_id, version, count(DISTINCT coalesce(leader_id, replica_id)) AS times,
               -- abs(): state_since is in the future if the clock was set back since.
               abs(extract(epoch FROM clock_timestamp() - max(state_since)))::float8 AS ago_s,
               array_agg(node_id ORDER BY state_since DESC) AS node_ids,
               (array_agg(state_reason ORDER BY state_since DESC))[1] AS reason
        FROM placement
        WHERE state = 'failed' AND restarts > 0
          AND state_since > clock_timestamp() - make_interval(secs => $1)
        GROUP BY deployment_id, version ORDER BY deployment_id, version
        """,
        GIVEN_UP_FOR_S,
    )
    return tuple(as_struct(row, StartFailures) for row in rows)


async def _read_distances(connection: Connection) -> tuple[PopDistance, ...]:
    rows = await connection.fetch(
        """
        SELECT r.pop AS from_pop, n.pop AS to_pop, min(rtt_ms) AS rtt_ms
        FROM round_trip r JOIN node n USING (node_id)
        WHERE measured_at > clock_timestamp() - interval '1 hour'
        GROUP BY r.pop, n.pop ORDER BY r.pop, n.pop
        """
    )
    return tuple(as_struct(row, PopDistance) for row in rows)


async def _read_profiles(connection: Connection) -> tuple[MeasuredProfile, ...]:
    rows = await connection.fetch("SELECT * FROM profile ORDER BY model_id, device_class")
    # The device memory that a replica has used is known of running ones only, and has no column.
    return tuple(
        MeasuredProfile(
            model_id=row["model_id"],
            device_class=row["device_class"],
            # Zeros included: the planner knows which values were measured (`capacity.is_measured`).
            profile=ReplicaProfile(
                **{field: row[field] for field in ReplicaProfile.__struct_fields__ if field in row}
            ),
        )
        for row in rows
    )
