-- The server on which the newest term began. The first term on another one, which may hold a restored
-- backup or lack the last transactions, waits for the nodes' reports before it publishes routes.

ALTER TABLE lease ADD COLUMN server text NOT NULL DEFAULT '';
