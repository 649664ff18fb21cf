-- A join token may be bound to a name, and may be good for several peers.
ALTER TABLE join_token
    ADD COLUMN name     text,
    ADD COLUMN uses_max integer NOT NULL DEFAULT 1 CHECK (uses_max > 0),
    ADD COLUMN uses     integer NOT NULL DEFAULT 0;
UPDATE join_token SET uses = 1 WHERE used_at IS NOT NULL;
ALTER TABLE join_token ADD CHECK (uses <= uses_max);

-- Certificates that are no longer accepted: one by its serial, or, where `serial` is empty, every
-- one of the name that was issued before `at`. A row outlives its peer's: a name forgotten and
-- joined again must not bring old certificates back to life.
CREATE TABLE revocation (
    role   text NOT NULL CHECK (role IN ('agent', 'router')),
    name   text NOT NULL,
    serial text NOT NULL DEFAULT '',
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason text NOT NULL DEFAULT '',
    PRIMARY KEY (role, name, serial)
);
CREATE INDEX revocation_at_idx ON revocation (at);
INSERT INTO revocation (role, name) SELECT 'agent', node_id FROM node WHERE revoked;
INSERT INTO revocation (role, name) SELECT 'router', router_id FROM router WHERE revoked;

-- The certificate each peer showed last, and since when a node is believed lost.
ALTER TABLE node
    ADD COLUMN certificate_serial     text NOT NULL DEFAULT '',
    ADD COLUMN certificate_expires_at timestamptz,
    ADD COLUMN lost_at                timestamptz;
ALTER TABLE router
    ADD COLUMN certificate_serial     text NOT NULL DEFAULT '',
    ADD COLUMN certificate_expires_at timestamptz;
