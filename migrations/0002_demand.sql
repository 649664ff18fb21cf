
-- Demand by minute, in partitions of a day: what is past its keeping is dropped whole. Days are
-- made ahead by a duty; what comes for a day not made yet waits in the default partition.
ALTER TABLE demand RENAME TO demand_whole;
ALTER TABLE demand_whole RENAME CONSTRAINT demand_pkey TO demand_whole_pkey;
CREATE TABLE demand (
    deployment_id   text NOT NULL,
    pop             text NOT NULL,
    minute          timestamptz NOT NULL,
    requests        bigint NOT NULL DEFAULT 0,
    prompt_tokens   bigint NOT NULL DEFAULT 0,
    uncached_tokens bigint NOT NULL DEFAULT 0,
    output_tokens   bigint NOT NULL DEFAULT 0,
    refused         bigint NOT NULL DEFAULT 0,
    no_replica      bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (minute, deployment_id, pop)
) PARTITION BY RANGE (minute);
CREATE TABLE demand_default PARTITION OF demand DEFAULT;
INSERT INTO demand (deployment_id, pop, minute, requests, prompt_tokens, uncached_tokens,
                    output_tokens, refused, no_replica)
    SELECT deployment_id, pop, minute, requests, prompt_tokens, uncached_tokens,
           output_tokens, refused, no_replica FROM demand_whole;
DROP TABLE demand_whole;
CREATE INDEX demand_seen_at_idx ON demand_seen (seen_at);
