"""Deletes rows past their retention, in batches, so that no table is locked for long.

A row is expired only if both clocks agree, the database's and the acting scheduler's: one clock
that is a year ahead must not delete this year's rows. If both are set ahead together, while a
scheduler runs or before it starts, the time that schedulers have seen passing decides
(`scheduler/decide/history_time.py`).
"""

from datetime import datetime
from typing import Final, NamedTuple

from isochrone.service.trust.identity import CERTIFICATE_LIFETIME_S
from scheduler.store.history_clock import HISTORY_AT
from scheduler.store.pool import Connection, affected_rows

DAY_S: Final = 86_400.0

DEMAND_DAYS: Final = 15
"""How long demand minutes are kept: the forecast can learn two weeks of them again."""

USAGE_DAYS: Final = 90

TRIAL_DAYS: Final = 7
"""How long a rollout's measurements are kept after its last step began: one for each pair of PoPs,
so a large fleet has tens of thousands for each step."""

_UNCOUNTED_TRIALS: Final = """(
    SELECT trial.ctid, r.step_since FROM rollout r
    -- Looked up one by one: as a join, all trials would be read.
    CROSS JOIN LATERAL (
        SELECT t.ctid FROM rollout_trial t WHERE t.rollout_id = r.rollout_id
            AND (t.step < r.step OR r.state NOT IN ('running', 'paused')) OFFSET 0
    ) AS trial
) AS uncounted"""
"""Measurements of earlier steps and of rollouts that have ended: none is compared again."""


class RetentionRule(NamedTuple):
    """Deletes a table's rows whose `age_column` is older than `keep_s`, except where `unless`.

    `candidates` is a subquery of the rows to consider; empty for the whole table.
    """

    table: str
    age_column: str
    keep_s: float
    unless: str = "false"
    candidates: str = ""


FIXED_RULES: Final = (
    RetentionRule("demand_default", "minute", DEMAND_DAYS * DAY_S),
    RetentionRule("demand_seen", "seen_at", 3 * 3600.0),
    RetentionRule("usage", "started_at", USAGE_DAYS * DAY_S),
    RetentionRule("key_day", "day", USAGE_DAYS * DAY_S),
    RetentionRule("idempotency", "created_at", DAY_S),
    RetentionRule("placement", "released_at", 7 * DAY_S),
    # Kept as long as usage, whose price is that of its deployment.
    RetentionRule(
        "deployment",
        "deleted_at",
        USAGE_DAYS * DAY_S,
        "EXISTS (SELECT FROM placement p WHERE p.deployment_id = deployment.deployment_id)",
    ),
    RetentionRule("rollout_trial", "step_since", TRIAL_DAYS * DAY_S, candidates=_UNCOUNTED_TRIALS),
    RetentionRule("stored_response", "expires_at", 0.0),
    RetentionRule("conversation", "expires_at", 0.0),
    RetentionRule("join_token", "expires_at", 7 * DAY_S),
)


def retention_rules(
    *, event_days: float, certificate_lifetime_s: float
) -> tuple[RetentionRule, ...]:
    """Return all rules, with these settings."""
    # Ids rise with time, so the oldest events are found without an index on the time.
    oldest = "(SELECT ctid, at FROM event ORDER BY event_id LIMIT $1) AS oldest"
    # Certificates issued under an earlier, longer setting may still be valid.
    lifetime_s = max(CERTIFICATE_LIFETIME_S, certificate_lifetime_s)
    return (
        RetentionRule("event", "at", event_days * DAY_S, candidates=oldest),
        RetentionRule("revocation", "at", lifetime_s),
        *FIXED_RULES,
    )


async def delete_expired(
    connection: Connection, rule: RetentionRule, now: datetime, batch: int
) -> int:
    """Delete up to `batch` rows that are expired at `now` and by the database; return how many."""
    # now() and not clock_timestamp(), which is volatile and so prevents the use of an index. In the
    # order of age, because the planner expects a third of the rows to be expired: without it, it
    # reads a large table from its beginning to find the first of them, and mostly there are none.
    order = "" if rule.candidates else f"ORDER BY {rule.age_column}"
    done = await connection.execute(
        f"""
        DELETE FROM {rule.table} WHERE ctid IN (
            SELECT ctid FROM {rule.candidates or rule.table}
            WHERE {rule.age_column} < least(now(), $2, {HISTORY_AT}) - make_interval(secs => $3)
                AND NOT {rule.unless} {order} LIMIT $1)
        """,  # noqa: S608
        batch,
        now,
        rule.keep_s,
    )
    return affected_rows(done)
