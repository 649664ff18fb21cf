-- The operator's announcement that a deployment will end; null while there is none.
ALTER TABLE deployment ADD COLUMN deprecation jsonb;
