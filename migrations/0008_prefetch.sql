-- Weights that a node should have before it is asked to run them, and by when: as the scheduler
-- foresees it. Kept until the time has passed, so that nothing else takes their place on the disk.
CREATE TABLE prefetch (
    node_id       text NOT NULL REFERENCES node ON DELETE CASCADE,
    model_id      text NOT NULL REFERENCES model ON DELETE CASCADE,
    deployment_id text NOT NULL REFERENCES deployment ON DELETE CASCADE,
    bytes_per_s   double precision NOT NULL,
    reason        text NOT NULL,
    wished_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at        timestamptz NOT NULL,
    -- When the node was first seen to hold them.
    held_at       timestamptz,
    PRIMARY KEY (node_id, model_id)
);
