-- A replica over several nodes: each node's part is a placement of its own, which knows its leader's.
-- What the spec says of the group is the only truth of it; NULL where the part leads or is alone.
ALTER TABLE placement
    ADD COLUMN leader_id text
        GENERATED ALWAYS AS (nullif(spec #>> '{group,leader_id}', replica_id)) STORED,
    ADD COLUMN rank_port integer
        GENERATED ALWAYS AS ((spec #>> '{group,port}')::integer) STORED;
CREATE INDEX placement_leader_idx ON placement (leader_id) WHERE released_at IS NULL;
