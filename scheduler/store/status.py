"""Reads the state of the whole fleet."""

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Final

import asyncpg

from isochrone import __version__
from isochrone.wire.admin import StatusView
from isochrone.wire.ids import NodeId
from scheduler.decide.cluster import UnmetRequirement
from scheduler.store.pool import Connection, as_struct, fetch_one

PROBLEMS_MAX: Final = 50
"""How many problems of one kind are listed at most; of the others the number is given."""

NEVER_CONNECTED: Final = "has joined and never connected: start its agent, or revoke it"


async def read_status(
    connection: Connection,
    *,
    scheduler: str,
    is_acting: bool,
    silent_s: Mapping[NodeId, float],
    silent_after_s: float,
    frozen: str,
    unmet: Sequence[UnmetRequirement],
    unreadable: Sequence[str] = (),
    behind: Mapping[str, str] = MappingProxyType({}),
    nodes_behind: Mapping[NodeId, str] = MappingProxyType({}),
    clocks: Sequence[str] = (),
) -> StatusView:
    """Return counts and problems; the arguments are what only the answering process knows.

    The silence of nodes that this process has not heard is taken from the store. Routers `behind`
    do not follow the route tables, `nodes_behind` not their assignment, for the reasons given.
    `clocks` says which peers' clocks are wrong.
    """
    row = await fetch_one(
        connection,
        """
        SELECT c.cluster_id, c.generation, c.route_generation, l.epoch,
            CASE WHEN l.expires_at > clock_timestamp() THEN split_part(l.holder, '/', 1)
                ELSE '' END AS acting_scheduler,
            (SELECT count(*) FROM pop) AS pops,
            (SELECT count(*) FROM deployment WHERE deleted_at IS NULL) AS deployments
        FROM cluster c, lease l
        """,
    )
    routers = await _router_problems(connection, silent_after_s, behind)
    lagging = [f"router {name}: {reason}" for name, reason in routers.items() if reason]
    nodes = await _nodes(connection)
    silent, unready = list[str](), list[str]()
    for node in nodes:
        node_id = node["node_id"]
        if silent_s.get(node_id, node["silent_s"]) >= silent_after_s:
            words = "is silent" if node["silent_s"] < inf else NEVER_CONNECTED
            silent.append(f"node {node_id} {words}")
        elif node_id in nodes_behind:
            unready.append(f"node {node_id}: {nodes_behind[node_id]}")
    return as_struct(
        row,
        StatusView,
        scheduler=scheduler,
        release=__version__,
        releases=await _releases(connection),
        acting=is_acting,
        nodes=len(nodes),
        nodes_ready=len(nodes) - len(silent) - len(unready),
        routers=len(routers),
        routers_ready=len(routers) - len(lagging),
        not_following=(
            *_shortened(lagging, "routers do not follow: see `isochrone routers list`"),
            *_shortened(unready, "nodes do not follow: see `isochrone nodes list`"),
        ),
        clocks=tuple(_shortened(clocks, "clocks are wrong: see the scheduler's log")),
        frozen=frozen,
        replicas=await _replica_states(connection),
        unmet=(
            *(f"{need.deployment_id}: {need.reason}" for need in unmet),
            *_shortened(unreadable, "rows cannot be read: see the scheduler's log"),
            *_shortened(silent, "nodes are silent: see `isochrone nodes list`"),
            *await _replica_problems(connection),
        ),
    )


def _shortened(problems: Sequence[str], others: str, count: int = 0) -> list[str]:
    """Return the first of `count` problems (default: all), and how many there are besides."""
    shown = [*problems[:PROBLEMS_MAX]]
    more = (count or len(problems)) - len(shown)
    return [*shown, f"{more} more {others}"] if more else shown


async def _replica_problems(connection: Connection) -> list[str]:
    rows = await connection.fetch(
        """
        SELECT format('%s on %s is %s: %s', replica_id, node_id, state, state_reason) AS words,
            count(*) OVER () AS count
        FROM placement
        WHERE released_at IS NULL AND ended_at IS NULL AND state <> 'warm' AND state_reason <> ''
        ORDER BY words LIMIT $1
        """,
        PROBLEMS_MAX,
    )
    words = [row["words"] for row in rows]
    return _shortened(words, "replicas are not warm", rows[0]["count"] if rows else 0)


async def _router_problems(
    connection: Connection, silent_after_s: float, behind: Mapping[str, str]
) -> dict[str, str]:
    """Return every router, with the reason why it does not follow; empty if it does."""
    rows = await connection.fetch(
        """
        SELECT router_id, coalesce(extract(epoch FROM clock_timestamp() - last_seen_at),
                                   'infinity')::float8 AS silent_s
        FROM router WHERE NOT revoked ORDER BY router_id
        """
    )
    return {
        row["router_id"]: "not connected"
        if row["silent_s"] >= silent_after_s
        else behind.get(row["router_id"], "")
        for row in rows
    }


async def _releases(connection: Connection) -> dict[str, int]:
    """Return how many nodes and routers registered last with each release."""
    rows = await connection.fetch(
        """
        SELECT release, count(*) AS peers
        FROM (SELECT release FROM node WHERE NOT revoked
              UNION ALL SELECT release FROM router WHERE NOT revoked) peer
        WHERE release <> '' GROUP BY release ORDER BY release
        """
    )
    return {row["release"]: row["peers"] for row in rows}


async def _nodes(connection: Connection) -> list[asyncpg.Record]:
    """Return the nodes and for how long the store has not heard of each."""
    rows: list[asyncpg.Record] = await connection.fetch(
        """
        SELECT node_id, coalesce(abs(extract(epoch FROM clock_timestamp() - last_seen_at)),
                                 'infinity')::float8 AS silent_s
        FROM node WHERE NOT revoked ORDER BY node_id
        """
    )
    return rows


async def _replica_states(connection: Connection) -> dict[str, int]:
    """Return how many replicas are in each state."""
    states = await connection.fetch(
        """
        SELECT CASE WHEN ended_at IS NULL THEN state ELSE 'draining' END AS state, count(*) AS n
        FROM placement WHERE released_at IS NULL AND leader_id IS NULL GROUP BY 1
        """
    )
    return {state["state"]: state["n"] for state in states}
