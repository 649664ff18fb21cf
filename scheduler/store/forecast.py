"""The forecast's input (demand by time slot) and its saved state (one row for each series)."""

from collections.abc import Sequence
from typing import NamedTuple

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.demand import SLOT_S, SeriesKey, SlotDemand
from scheduler.store.pool import Connection, affected_rows


class StoredSeries(NamedTuple):
    """A saved series: its key, the last slot learned, and the encoded state."""

    key: SeriesKey
    slot: int
    state: bytes


async def read_clock(connection: Connection) -> float:
    """Return the database's time, by which demand minutes are counted, as Unix time."""
    return float(await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8"))


async def read_slot(connection: Connection, slot: int) -> dict[SeriesKey, SlotDemand] | None:
    """Return the demand of a slot; None if no router sent any in it, so that it is unknown."""
    rows = await connection.fetch(
        """
        SELECT deployment_id, pop, sum(requests)::float8 AS requests,
               sum(prompt_tokens)::float8 AS prompt, sum(uncached_tokens)::float8 AS uncached,
               sum(output_tokens)::float8 AS output, sum(refused)::float8 AS refused
        FROM demand WHERE minute >= to_timestamp($1) AND minute < to_timestamp($2)
        GROUP BY deployment_id, pop
        """,
        slot * SLOT_S,
        (slot + 1) * SLOT_S,
    )
    if not rows and not await connection.fetchval(
        """
        SELECT EXISTS (SELECT FROM demand_seen
                       WHERE seen_at >= to_timestamp($1) AND seen_at < to_timestamp($2))
        """,
        slot * SLOT_S,
        (slot + 1) * SLOT_S,
    ):
        return None
    return {
        (DeploymentId(row["deployment_id"]), PopId(row["pop"])): SlotDemand(
            requests_per_s=row["requests"] / SLOT_S,
            prompt_tokens_per_s=row["prompt"] / SLOT_S,
            uncached_tokens_per_s=row["uncached"] / SLOT_S,
            # Refused requests would have been answered like the others.
            output_tokens_per_s=row["output"]
            / SLOT_S
            * row["requests"]
            / max(1.0, row["requests"] - row["refused"]),
        )
        for row in rows
    }


async def read_series(
    connection: Connection, after: SeriesKey | None, limit: int
) -> list[StoredSeries]:
    """Return up to `limit` saved series after a key, in the order of their keys."""
    rows = await connection.fetch(
        """
        SELECT deployment_id, pop, slot, state FROM demand_series
        WHERE (deployment_id, pop) > ($1, $2) ORDER BY deployment_id, pop LIMIT $3
        """,
        after[0] if after else "",
        after[1] if after else "",
        limit,
    )
    return [
        StoredSeries((row["deployment_id"], row["pop"]), row["slot"], row["state"]) for row in rows
    ]


async def save_series(connection: Connection, rows: Sequence[StoredSeries]) -> None:
    """Save series; a row with a later slot is left as it is."""
    await connection.executemany(
        """
        INSERT INTO demand_series AS s (deployment_id, pop, slot, state) VALUES ($1, $2, $3, $4)
        ON CONFLICT (deployment_id, pop) DO UPDATE
            SET slot = $3, state = $4, updated_at = clock_timestamp()
            WHERE s.slot <= $3
        """,
        [(*row.key, row.slot, row.state) for row in rows],
    )


async def forget_series(
    connection: Connection, before_slot: int, after_slot: int | None = None
) -> int:
    """Delete series last learned before one slot or after the other; return how many."""
    done = await connection.execute(
        "DELETE FROM demand_series WHERE slot < $1 OR slot > $2", before_slot, after_slot
    )
    return affected_rows(done)
