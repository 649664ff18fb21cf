"""What is past its keeping goes, a batch at a time: no table is locked for long.

Past is only what two clocks take for past, the database's and that of the scheduler that acts: one
that was set a year ahead must not have this year's record forgotten.
"""

from datetime import datetime
from typing import Final, NamedTuple

from isochrone.service.identity import CERTIFICATE_LIFETIME_S
from scheduler.store.pool import Connection, affected_rows

DAY_S: Final = 86_400.0

DEMAND_DAYS: Final = 15
"""How long minutes are kept: two weeks of them can be learned from anew."""

USAGE_DAYS: Final = 90


class RetentionRule(NamedTuple):
    """Rows of a table, which go when their `since` is `keep_s` ago and `unless` says nothing else.

    `among` are those looked at, where it is not all of them.
    """

    table: str
    since: str
    keep_s: float
    unless: str = "false"
    among: str = ""


FIXED_RULES: Final = (
    RetentionRule("demand_default", "minute", DEMAND_DAYS * DAY_S),
    RetentionRule("demand_seen", "seen_at", 3 * 3600.0),
    RetentionRule("usage", "started_at", USAGE_DAYS * DAY_S),
    RetentionRule("key_day", "day", USAGE_DAYS * DAY_S),
    RetentionRule("idempotency", "created_at", DAY_S),
    RetentionRule("placement", "released_at", 7 * DAY_S),
    # Usage names its deployment, by which it is priced: as long as usage itself.
    RetentionRule(
        "deployment",
        "deleted_at",
        USAGE_DAYS * DAY_S,
        "EXISTS (SELECT FROM placement p WHERE p.deployment_id = deployment.deployment_id)",
    ),
    RetentionRule("join_token", "expires_at", 7 * DAY_S),
)


def retention_rules(
    *, event_days: float, certificate_lifetime_s: float
) -> tuple[RetentionRule, ...]:
    """Return what is kept, and how long."""
    # The id rises with the time, so that the oldest are found without an index on the time.
    oldest = "(SELECT ctid, at FROM event ORDER BY event_id LIMIT $1) AS oldest"
    # A certificate of an earlier, longer setting may still live.
    lifetime_s = max(CERTIFICATE_LIFETIME_S, certificate_lifetime_s)
    return (
        RetentionRule("event", "at", event_days * DAY_S, among=oldest),
        RetentionRule("revocation", "at", lifetime_s),
        *FIXED_RULES,
    )


async def delete_expired(
    connection: Connection, what: RetentionRule, now: datetime, batch: int
) -> int:
    """Forget a batch of what is past its keeping, `now` and by the database; return how many."""
    # Not clock_timestamp(): what may change from row to row is looked up in no index.
    done = await connection.execute(
        f"""
        DELETE FROM {what.table} WHERE ctid IN (
            SELECT ctid FROM {what.among or what.table}
            WHERE {what.since} < least(now(), $2) - make_interval(secs => $3)
                AND NOT {what.unless} LIMIT $1)
        """,  # noqa: S608
        batch,
        now,
        what.keep_s,
    )
    return affected_rows(done)
