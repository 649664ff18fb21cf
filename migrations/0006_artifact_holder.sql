-- Which artifacts are whole on which node's disk, as the nodes report: who may be asked for weights.
CREATE TABLE artifact_holder (
    node_id text NOT NULL REFERENCES node ON DELETE CASCADE,
    digest  text NOT NULL,
    PRIMARY KEY (node_id, digest)
);
CREATE INDEX artifact_holder_digest_idx ON artifact_holder (digest);
