
-- What the forecast has learned of a deployment in a city, as the scheduler wrote it: a new acting
-- scheduler goes on from it, and from `demand` since `slot` (ten minutes, counted from 1970).
CREATE TABLE demand_series (
    deployment_id text NOT NULL,
    pop           text NOT NULL,
    slot          bigint NOT NULL,
    state         bytea NOT NULL,
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (deployment_id, pop)
);
