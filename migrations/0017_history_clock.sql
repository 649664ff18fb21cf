-- Up to when schedulers have seen time pass. History is deleted by this clock: the wall clocks of the
-- database and of a scheduler that starts may both be an hour or a year ahead.
CREATE TABLE history_clock (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    at       timestamptz NOT NULL
);
INSERT INTO history_clock (at)
SELECT least(clock_timestamp(),
             coalesce((SELECT at FROM event ORDER BY event_id DESC LIMIT 1), clock_timestamp()));

-- Keys are read in pages, in the order in which routers sort them. Tombstones are read by age.
CREATE INDEX api_key_by_bytes ON api_key (key_id COLLATE "C");
CREATE INDEX api_key_revoked ON api_key (revoked_at) WHERE revoked_at IS NOT NULL;
