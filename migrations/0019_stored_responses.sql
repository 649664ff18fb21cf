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
