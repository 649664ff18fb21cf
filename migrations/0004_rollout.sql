
-- A new version on its way to serve everybody, in steps. Its whole state is this row: whoever acts
-- goes on from it. `spec` is the wish (target model and engine, steps, bounds), `step` the number of
-- the step that serves now. At most one is on its way for a deployment.
CREATE TABLE rollout (
    rollout_id    text PRIMARY KEY,
    deployment_id text NOT NULL REFERENCES deployment ON DELETE CASCADE,
    from_version  integer NOT NULL,
    to_version    integer NOT NULL CHECK (to_version > from_version),
    spec          jsonb NOT NULL,
    state         text NOT NULL DEFAULT 'running' CHECK (state IN
        ('running', 'paused', 'done', 'reverted', 'aborted')),
    step          integer NOT NULL DEFAULT 0 CHECK (step >= 0),
    reason        text NOT NULL DEFAULT '',
    step_since    timestamptz NOT NULL DEFAULT clock_timestamp(),
    etag          bigint NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (deployment_id, to_version)
);
CREATE UNIQUE INDEX rollout_on_its_way_idx ON rollout (deployment_id)
    WHERE state IN ('running', 'paused');

-- What routers saw of either version in a step, by the city that asked and the PoP that answered.
-- Times are sums of logarithms of ms and of their squares.
CREATE TABLE rollout_trial (
    rollout_id   text NOT NULL REFERENCES rollout ON DELETE CASCADE,
    step         integer NOT NULL,
    version      integer NOT NULL,
    pop          text NOT NULL,
    asked_pop    text NOT NULL,
    attempts     bigint NOT NULL DEFAULT 0,
    failures     bigint NOT NULL DEFAULT 0,
    ttft_count   bigint NOT NULL DEFAULT 0,
    ttft_total   double precision NOT NULL DEFAULT 0,
    ttft_squares double precision NOT NULL DEFAULT 0,
    itl_count    bigint NOT NULL DEFAULT 0,
    itl_total    double precision NOT NULL DEFAULT 0,
    itl_squares  double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (rollout_id, step, version, pop, asked_pop)
);
