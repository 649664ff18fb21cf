-- The number of the secret from which every node computes the cache salts of tenants. The secret is
-- derived from it and the authority's key, and is not in the database. To replace the secret, add 1.
ALTER TABLE cluster ADD COLUMN cache_salt_version integer NOT NULL DEFAULT 1;
