
-- A new version on its way to serve everybody, in steps. Its whole state is this row: whoever acts
-- goes on from it. `spec` is the wish (target model and engine, steps, limits), `step` the number of
-- the step that serves now. At most one is on its way for a deployment.
CREATE TABLE rollout (
    rollout_id    text PRIMARY KEY,
    deployment_id text NOT NULL REFERENCES deployment,
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

ALTER TABLE usage ADD COLUMN asked_pop text NOT NULL DEFAULT '';
ALTER TABLE usage ADD COLUMN version integer NOT NULL DEFAULT 0;
CREATE INDEX usage_version_idx ON usage (deployment_id, version, started_at);
