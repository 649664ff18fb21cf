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
