-- Where a key's requests may be processed: PoPs or countries; empty for everywhere.
ALTER TABLE api_key ADD COLUMN regions text[] NOT NULL DEFAULT '{}';
