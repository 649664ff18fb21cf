-- The whole schema at head. Written by `python -m migrations.dump`; do not edit.

-- The fleet's only durable truth. Times are Postgres's own clock; epochs and generations order
-- what clocks cannot.

-- One row. `generation` moves with every change that a plan depends on; a plan commits only if it
-- has not moved since its picture was read. `route_generation` numbers the route tables.
CREATE TABLE cluster (
    only_row         boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    cluster_id       text NOT NULL,
    generation       bigint NOT NULL DEFAULT 1 CHECK (generation > 0),
    route_generation bigint NOT NULL DEFAULT 1 CHECK (route_generation > 0),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Who acts. Every decision is written `WHERE epoch = $n`; the epoch only rises.
CREATE TABLE lease (
    only_row   boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    epoch      bigint NOT NULL DEFAULT 0,
    holder     text NOT NULL DEFAULT '',
    acting_since timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL DEFAULT '-infinity'
);

CREATE FUNCTION epoch_only_rises() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch < OLD.epoch THEN
        RAISE EXCEPTION 'cannot lower the epoch from % to %', OLD.epoch, NEW.epoch;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER lease_epoch_only_rises BEFORE UPDATE ON lease
    FOR EACH ROW EXECUTE FUNCTION epoch_only_rises();

CREATE TABLE pop (
    pop        text PRIMARY KEY CHECK (pop ~ '^[a-z]{3}$'),
    city       text NOT NULL,
    country    text NOT NULL CHECK (country ~ '^[A-Z]{2}$'),
    latitude   double precision NOT NULL CHECK (latitude BETWEEN -90 AND 90),
    longitude  double precision NOT NULL CHECK (longitude BETWEEN -180 AND 180),
    etag       bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A one-time right to join, bound to a PoP. Only the SHA-256 of its secret is kept.
CREATE TABLE join_token (
    token_id      text PRIMARY KEY,
    secret_sha256 text NOT NULL,
    role          text NOT NULL CHECK (role IN ('agent', 'router')),
    pop           text NOT NULL REFERENCES pop,
    expires_at    timestamptz NOT NULL,
    used_at       timestamptz,
    used_by       text,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- `report` is the node's last whole report as it came (msgpack); what queries need stands beside it.
CREATE TABLE node (
    node_id       text PRIMARY KEY,
    pop           text NOT NULL REFERENCES pop,
    address       text NOT NULL DEFAULT '',
    boot_id       text NOT NULL DEFAULT '',
    report_seq    bigint NOT NULL DEFAULT 0,
    report        bytea,
    reported_at   timestamptz,
    last_seen_at  timestamptz,
    -- The generation of the assignment that this node has reached.
    generation    bigint NOT NULL DEFAULT 0,
    -- The generation in which this node's assignment last changed.
    assigned      bigint NOT NULL DEFAULT 0,
    draining      boolean NOT NULL DEFAULT false,
    revoked       boolean NOT NULL DEFAULT false,
    etag          bigint NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX node_pop_idx ON node (pop);

CREATE TABLE device (
    node_id      text NOT NULL REFERENCES node ON DELETE CASCADE,
    device_id    text NOT NULL,
    device_class text NOT NULL,
    memory_bytes bigint NOT NULL CHECK (memory_bytes >= 0),
    healthy      boolean NOT NULL DEFAULT true,
    reason       text NOT NULL DEFAULT '',
    PRIMARY KEY (node_id, device_id)
);

CREATE TABLE router (
    router_id    text PRIMARY KEY,
    pop          text NOT NULL REFERENCES pop,
    boot_id      text NOT NULL DEFAULT '',
    last_seen_at timestamptz,
    -- The route table generation that this router has.
    generation   bigint NOT NULL DEFAULT 0,
    revoked      boolean NOT NULL DEFAULT false,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE model (
    model_id   text PRIMARY KEY,
    spec       jsonb NOT NULL,
    etag       bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE deployment (
    deployment_id text PRIMARY KEY,
    name          text NOT NULL,
    model_id      text NOT NULL REFERENCES model,
    version       integer NOT NULL DEFAULT 1 CHECK (version > 0),
    engine        jsonb NOT NULL,
    policy        jsonb NOT NULL,
    etag          bigint NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- A deleted deployment stays until its last replica has ended.
    deleted_at    timestamptz
);
CREATE UNIQUE INDEX deployment_name_idx ON deployment (name) WHERE deleted_at IS NULL;

-- A replica's seat. `ended_*` is its tombstone; `released_at` is when the node said it is gone.
CREATE TABLE placement (
    replica_id       text PRIMARY KEY,
    deployment_id    text NOT NULL REFERENCES deployment,
    version          integer NOT NULL,
    node_id          text NOT NULL REFERENCES node,
    role             text NOT NULL DEFAULT 'unified',
    memory_bytes     bigint NOT NULL CHECK (memory_bytes >= 0),
    spec             jsonb NOT NULL,
    reason           text NOT NULL,
    placed_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    placed_generation bigint NOT NULL,
    ended_at         timestamptz,
    ended_generation bigint,
    ended_reason     text,
    drain_timeout_s  double precision NOT NULL DEFAULT 30,
    released_at      timestamptz,
    -- What the node last said of it.
    state            text NOT NULL DEFAULT 'wanted' CHECK (state IN
        ('wanted', 'fetching', 'loading', 'warm', 'draining', 'stopped', 'failed')),
    state_reason     text NOT NULL DEFAULT '',
    state_since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    restarts         integer NOT NULL DEFAULT 0,
    fetched_bytes    bigint NOT NULL DEFAULT 0,
    CHECK ((ended_at IS NULL) = (ended_generation IS NULL)),
    CHECK (released_at IS NULL OR ended_at IS NOT NULL)
);
CREATE INDEX placement_node_idx ON placement (node_id) WHERE released_at IS NULL;
CREATE INDEX placement_deployment_idx ON placement (deployment_id) WHERE released_at IS NULL;

CREATE TABLE placement_device (
    replica_id   text NOT NULL REFERENCES placement ON DELETE CASCADE,
    node_id      text NOT NULL,
    device_id    text NOT NULL,
    memory_bytes bigint NOT NULL CHECK (memory_bytes >= 0),
    PRIMARY KEY (replica_id, device_id),
    FOREIGN KEY (node_id, device_id) REFERENCES device
);
CREATE INDEX placement_device_idx ON placement_device (node_id, device_id);

-- A device seats what its memory holds, whoever writes. The row lock on the device serialises two
-- seats taken at once.
CREATE FUNCTION device_holds_its_seats() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    holds bigint;
    taken bigint;
BEGIN
    SELECT memory_bytes INTO holds FROM device
        WHERE node_id = NEW.node_id AND device_id = NEW.device_id FOR UPDATE;
    SELECT coalesce(sum(pd.memory_bytes), 0) INTO taken
        FROM placement_device pd JOIN placement p USING (replica_id)
        WHERE pd.node_id = NEW.node_id AND pd.device_id = NEW.device_id AND p.released_at IS NULL;
    IF taken > holds THEN
        RAISE EXCEPTION 'cannot seat %: % bytes taken of % on device % of node %',
            NEW.replica_id, taken, holds, NEW.device_id, NEW.node_id
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER placement_device_holds AFTER INSERT OR UPDATE ON placement_device
    FOR EACH ROW EXECUTE FUNCTION device_holds_its_seats();

-- What agents measured, per model and device class; the planner's rates.
CREATE TABLE profile (
    model_id             text NOT NULL REFERENCES model ON DELETE CASCADE,
    device_class         text NOT NULL,
    load_s               double precision NOT NULL DEFAULT 0,
    memory_bytes         bigint NOT NULL DEFAULT 0,
    prefill_tokens_per_s double precision NOT NULL DEFAULT 0,
    decode_tokens_per_s  double precision NOT NULL DEFAULT 0,
    updated_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (model_id, device_class)
);

-- Demand by minute. `demand_seen` makes a repeated batch harmless.
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
);
CREATE TABLE demand_seen (
    router_id text NOT NULL,
    boot_id   text NOT NULL,
    seq       bigint NOT NULL,
    seen_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (router_id, boot_id, seq)
);

CREATE TABLE usage (
    request_id    text PRIMARY KEY,
    key_id        text NOT NULL,
    tenant_id     text NOT NULL,
    deployment_id text NOT NULL,
    pop           text NOT NULL,
    node_id       text NOT NULL,
    replica_id    text NOT NULL,
    started_at    timestamptz NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    outcome       text NOT NULL,
    ttft_ms       double precision NOT NULL,
    duration_ms   double precision NOT NULL
);
CREATE INDEX usage_started_idx ON usage (started_at);
CREATE INDEX usage_tenant_idx ON usage (tenant_id, started_at);

CREATE TABLE round_trip (
    pop         text NOT NULL REFERENCES pop ON DELETE CASCADE,
    node_id     text NOT NULL REFERENCES node ON DELETE CASCADE,
    rtt_ms      double precision NOT NULL CHECK (rtt_ms >= 0),
    measured_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (pop, node_id)
);

CREATE TABLE api_key (
    key_id        text PRIMARY KEY,
    secret_sha256 text NOT NULL,
    tenant_id     text NOT NULL,
    note          text NOT NULL DEFAULT '',
    deployments   text[] NOT NULL DEFAULT '{}',
    limits        jsonb NOT NULL DEFAULT '{}',
    expires_at    timestamptz,
    revoked_at    timestamptz,
    etag          bigint NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Who did what, written in the transaction of the deed. Append only.
CREATE TABLE event (
    event_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text NOT NULL,
    kind       text NOT NULL,
    subject    text NOT NULL,
    reason     text NOT NULL DEFAULT '',
    before     jsonb,
    after      jsonb,
    request_id text NOT NULL DEFAULT ''
);
CREATE INDEX event_subject_idx ON event (subject, event_id);
CREATE FUNCTION event_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'cannot change event %: the record is append only', OLD.event_id;
END $$;
CREATE TRIGGER event_append_only BEFORE UPDATE ON event
    FOR EACH ROW EXECUTE FUNCTION event_is_append_only();

-- The last answer to each Idempotency-Key, so that a repeated request is answered, not repeated.
CREATE TABLE idempotency (
    idempotency_key text NOT NULL,
    method          text NOT NULL,
    path            text NOT NULL,
    body_sha256     text NOT NULL,
    status          integer NOT NULL,
    headers         jsonb NOT NULL DEFAULT '{}',
    body            bytea NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (idempotency_key, method, path)
);


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

-- Which artifacts are whole on which node's disk, as the nodes report: who may be asked for weights.
CREATE TABLE artifact_holder (
    node_id text NOT NULL REFERENCES node ON DELETE CASCADE,
    digest  text NOT NULL,
    PRIMARY KEY (node_id, digest)
);
CREATE INDEX artifact_holder_digest_idx ON artifact_holder (digest);

-- What a key used on a day (UTC), for the keys that have a quota. Usage that is counted once is
-- counted here once: a row that was there already fires no trigger.

CREATE TABLE key_day (
    key_id text NOT NULL REFERENCES api_key ON DELETE CASCADE,
    day    date NOT NULL,
    tokens bigint NOT NULL DEFAULT 0,
    spend  double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (key_id, day)
);

-- What is yet to be added to key_day. Rows are only appended here, so that two batches of usage
-- with the same keys never wait for one another.
CREATE TABLE key_use (
    key_id text NOT NULL,
    day    date NOT NULL,
    tokens bigint NOT NULL,
    spend  double precision NOT NULL
);

-- What some tokens of a deployment cost by its model's price now; 0 where it has none.
CREATE FUNCTION spend_of(which text, prompt bigint, cached bigint, output bigint)
RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(
        (prompt - cached) * coalesce((price->>'prompt_per_million')::float8, 0)
        + cached * coalesce((price->>'cached_per_million')::float8,
                            (price->>'prompt_per_million')::float8, 0)
        + output * coalesce((price->>'output_per_million')::float8, 0)
    ) / 1e6, 0)
    FROM (
        SELECT m.spec->'price' AS price FROM deployment d JOIN model m USING (model_id)
        WHERE d.deployment_id = which
    ) AS priced
$$;

CREATE FUNCTION usage_counts_for_its_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO key_use (key_id, day, tokens, spend)
    SELECT NEW.key_id, (NEW.started_at AT TIME ZONE 'UTC')::date,
           NEW.prompt_tokens + NEW.output_tokens,
           spend_of(NEW.deployment_id, NEW.prompt_tokens, NEW.cached_tokens, NEW.output_tokens)
    FROM api_key k
    WHERE k.key_id = NEW.key_id
        AND (coalesce((k.limits->>'tokens_per_day')::float8, 0) > 0
             OR coalesce((k.limits->>'spend_per_day')::float8, 0) > 0);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_counts AFTER INSERT ON usage
    FOR EACH ROW EXECUTE FUNCTION usage_counts_for_its_key();

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

-- A writer holds the epoch (`FOR KEY SHARE`) until it commits. As a key, the epoch cannot be changed
-- meanwhile, and the lease can still be renewed: that changes no key, so it waits for no writer.
ALTER TABLE lease ADD CONSTRAINT lease_epoch_key UNIQUE (epoch);

-- A replica over several nodes: each node's part is a placement of its own, which knows its leader's.
-- What the spec says of the group is the only truth of it; NULL where the part leads or is alone.
ALTER TABLE placement
    ADD COLUMN leader_id text
        GENERATED ALWAYS AS (nullif(spec #>> '{group,leader_id}', replica_id)) STORED,
    ADD COLUMN rank_port integer
        GENERATED ALWAYS AS ((spec #>> '{group,port}')::integer) STORED;
CREATE INDEX placement_leader_idx ON placement (leader_id) WHERE released_at IS NULL;

-- The model that a rollout on its way is bound for stays in the catalogue until it has arrived, or was
-- called off.
ALTER TABLE rollout
    ADD COLUMN bound_for text GENERATED ALWAYS AS (
        CASE WHEN state IN ('running', 'paused') THEN spec ->> 'model_id' END
    ) STORED;
ALTER TABLE rollout
    ADD CONSTRAINT rollout_bound_for_fkey FOREIGN KEY (bound_for) REFERENCES model NOT VALID;

-- The authority of the cluster's certificates, by its fingerprint; empty until a scheduler has told.
-- A scheduler that holds another would issue and show what nobody else in the cluster believes.
ALTER TABLE cluster ADD COLUMN authority text NOT NULL DEFAULT '';

-- What was given up of late, in every picture that placement decides from.
CREATE INDEX placement_failed_idx ON placement (state_since) WHERE state = 'failed';

-- The operator's announcement that a deployment will end; null while there is none.
ALTER TABLE deployment ADD COLUMN deprecation jsonb;

-- Where a key's requests may be processed: PoPs or countries; empty for everywhere.
ALTER TABLE api_key ADD COLUMN regions text[] NOT NULL DEFAULT '{}';

-- The number of the secret from which every node computes the cache salts of tenants. The secret is
-- derived from it and the authority's key, and is not in the database. To replace the secret, add 1.
ALTER TABLE cluster ADD COLUMN cache_salt_version integer NOT NULL DEFAULT 1;

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

-- Files and batches of the public API. The files themselves lie in the batch folder.
CREATE TABLE batch_file (
    file_id    text PRIMARY KEY,
    tenant_id  text NOT NULL,
    purpose    text NOT NULL,
    filename   text NOT NULL,
    size_bytes bigint NOT NULL CHECK (size_bytes >= 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz
);
CREATE INDEX batch_file_by_tenant ON batch_file (tenant_id, file_id);
CREATE INDEX batch_file_by_expiry ON batch_file (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE batch (
    batch_id        text PRIMARY KEY,
    tenant_id       text NOT NULL,
    key_id          text NOT NULL,
    endpoint        text NOT NULL,
    input_file_id   text NOT NULL,
    output_file_id  text,
    error_file_id   text,
    deployment      text NOT NULL DEFAULT '',
    status          text NOT NULL DEFAULT 'validating' CHECK (status IN ('validating', 'failed', 'in_progress',
                        'finalizing', 'completed', 'expired', 'cancelling', 'cancelled')),
    metadata        jsonb NOT NULL DEFAULT '{}',
    errors          jsonb NOT NULL DEFAULT '[]',
    total           integer NOT NULL DEFAULT 0,
    completed       integer NOT NULL DEFAULT 0,
    failed          integer NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL DEFAULT now(),
    expires_at      timestamptz NOT NULL,
    in_progress_at  timestamptz,
    finalizing_at   timestamptz,
    completed_at    timestamptz,
    failed_at       timestamptz,
    expired_at      timestamptz,
    cancelling_at   timestamptz,
    cancelled_at    timestamptz,
    -- Its items are deleted some time after its end.
    has_items       boolean NOT NULL DEFAULT true,
    -- Every item is answered at most once.
    CHECK (completed >= 0 AND failed >= 0 AND completed + failed <= total)
);
CREATE INDEX batch_by_tenant ON batch (tenant_id, batch_id);
CREATE INDEX batch_open ON batch (status, created_at)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batch_ended ON batch (batch_id)
    WHERE has_items AND status IN ('completed', 'failed', 'expired', 'cancelled');

-- One line of an input file, and its result until the batch ends.
CREATE TABLE batch_item (
    batch_id     text NOT NULL REFERENCES batch ON DELETE CASCADE,
    line         integer NOT NULL,
    custom_id    text NOT NULL,
    byte_offset  bigint NOT NULL,
    byte_length  integer NOT NULL,
    -- Until then the item is leased, or waits after a failure.
    available_at timestamptz NOT NULL DEFAULT '-infinity',
    lease_id     text NOT NULL DEFAULT '',
    attempts     integer NOT NULL DEFAULT 0,
    is_done      boolean NOT NULL DEFAULT false,
    status_code  integer NOT NULL DEFAULT 0,
    request_id   text NOT NULL DEFAULT '',
    result       bytea,
    error_code   text NOT NULL DEFAULT '',
    PRIMARY KEY (batch_id, line)
);
CREATE INDEX batch_item_open ON batch_item (batch_id, available_at, line) WHERE NOT is_done;

-- Stored responses and conversations of the public API. Items are JSON arrays, as clients see them.
CREATE TABLE stored_response (
    response_id     text PRIMARY KEY,
    tenant_id       text NOT NULL,
    key_id          text NOT NULL,
    conversation_id text,
    status          text NOT NULL CHECK (status IN ('queued', 'in_progress', 'completed',
                        'incomplete', 'failed', 'cancelled')),
    is_background   boolean NOT NULL,
    body            bytea NOT NULL,
    -- The items before this response, and those of its own request.
    context_items   bytea NOT NULL,
    input_items     bytea NOT NULL,
    -- What a router needs to answer in the background; empty once the response has ended.
    run             bytea NOT NULL DEFAULT '',
    size_bytes      bigint NOT NULL,
    -- Until then the response is leased, or waits after a failure.
    available_at    timestamptz NOT NULL,
    lease_id        text NOT NULL DEFAULT '',
    attempts        integer NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL DEFAULT now(),
    expires_at      timestamptz NOT NULL
);
CREATE INDEX stored_response_by_tenant ON stored_response (tenant_id) INCLUDE (size_bytes);
CREATE INDEX stored_response_by_expiry ON stored_response (expires_at);
CREATE INDEX stored_response_open ON stored_response (available_at)
    WHERE status IN ('queued', 'in_progress');

CREATE TABLE conversation (
    conversation_id text PRIMARY KEY,
    tenant_id       text NOT NULL,
    metadata        jsonb NOT NULL DEFAULT '{}',
    item_count      integer NOT NULL DEFAULT 0,
    next_position   integer NOT NULL DEFAULT 0,
    size_bytes      bigint NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL DEFAULT now(),
    expires_at      timestamptz NOT NULL
);
CREATE INDEX conversation_by_tenant ON conversation (tenant_id) INCLUDE (size_bytes);
CREATE INDEX conversation_by_expiry ON conversation (expires_at);

CREATE TABLE conversation_item (
    conversation_id text NOT NULL REFERENCES conversation ON DELETE CASCADE,
    position        integer NOT NULL,
    item_id         text NOT NULL,
    item            bytea NOT NULL,
    PRIMARY KEY (conversation_id, position)
);
CREATE UNIQUE INDEX conversation_item_by_id ON conversation_item (conversation_id, item_id);

-- LoRA adapters. Files that clients have uploaded lie in the batch folder, each under its `file_id`.
CREATE TABLE adapter (
    adapter_id  text PRIMARY KEY,
    -- Empty for an adapter of the operator's, which is public.
    tenant_id   text NOT NULL,
    name        text NOT NULL,
    description text NOT NULL DEFAULT '',
    model_id    text NOT NULL REFERENCES model,
    -- What the client called the model: the name of a deployment.
    model_name  text NOT NULL,
    is_public   boolean NOT NULL DEFAULT false,
    rank        integer NOT NULL DEFAULT 0,
    -- [{path, size_bytes, sha256, file_id}]; file_id is empty for files that come from `source`.
    files       jsonb NOT NULL DEFAULT '[]',
    source      text NOT NULL DEFAULT '',
    -- Set once all files are there; they never change after that.
    digest      text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    modified_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (tenant_id, name)
);
CREATE INDEX adapter_public ON adapter (name) WHERE is_public;

-- A tenant's budget above its keys is a row of api_key whose id is 'tenant:' and the tenant's: routers get
-- it with the keys. It has no secret, so that no key of a client is it.

CREATE OR REPLACE FUNCTION usage_counts_for_its_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO key_use (key_id, day, tokens, spend)
    SELECT k.key_id, (NEW.started_at AT TIME ZONE 'UTC')::date,
           NEW.prompt_tokens + NEW.output_tokens,
           spend_of(NEW.deployment_id, NEW.prompt_tokens, NEW.cached_tokens, NEW.output_tokens)
    FROM api_key k
    WHERE k.key_id IN (NEW.key_id, 'tenant:' || NEW.tenant_id)
        AND (coalesce((k.limits->>'tokens_per_day')::float8, 0) > 0
             OR coalesce((k.limits->>'spend_per_day')::float8, 0) > 0
             OR coalesce((k.limits->>'tokens_per_month')::float8, 0) > 0
             OR coalesce((k.limits->>'spend_per_month')::float8, 0) > 0);
    RETURN NULL;
END $$;

-- Rows past their retention are looked for every few minutes, mostly in vain: without these, each
-- time among all days of all keys, and all answers of a day.

CREATE INDEX key_day_by_day ON key_day (day);
CREATE INDEX idempotency_by_age ON idempotency (created_at);

-- While it equals route_generation, no route table was published since a loss of history: whichever
-- scheduler publishes the first one waits for the nodes' reports, also after a takeover.

ALTER TABLE cluster ADD COLUMN lost_generation bigint NOT NULL DEFAULT 0;

-- The server on which the newest term began. The first term on another one, which may hold a restored
-- backup or lack the last transactions, waits for the nodes' reports before it publishes routes.

ALTER TABLE lease ADD COLUMN server text NOT NULL DEFAULT '';

-- Lists of files and batches are read in the order of creation. The indexes by id served none: the
-- database read and sorted all rows of a tenant for each page.

CREATE INDEX batch_file_listed ON batch_file (tenant_id, created_at, file_id);
CREATE INDEX batch_file_listed_by_purpose ON batch_file (tenant_id, purpose, created_at, file_id);
DROP INDEX batch_file_by_tenant;

CREATE INDEX batch_listed ON batch (tenant_id, created_at, batch_id);
DROP INDEX batch_by_tenant;

-- When the scheduler planned it. No release names this column: a row gets its default.

ALTER TABLE prefetch RENAME COLUMN wished_at TO planned_at;

-- Placements past their retention are looked for every few minutes, mostly in vain: without this, each
-- time among all placements of a week.

CREATE INDEX placement_by_release ON placement (released_at) WHERE released_at IS NOT NULL;

-- When the scheduler planned it: nothing reads it, and no release names this column (0026).

ALTER TABLE prefetch DROP COLUMN planned_at;

-- The version of Isochrone with which a peer registered last; empty until it has. Operators see in it
-- how far an upgrade has come.

ALTER TABLE node ADD COLUMN release text NOT NULL DEFAULT '';
ALTER TABLE router ADD COLUMN release text NOT NULL DEFAULT '';
