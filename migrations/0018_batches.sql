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
