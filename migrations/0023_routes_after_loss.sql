-- While it equals route_generation, no route table was published since a loss of history: whichever
-- scheduler publishes the first one waits for the nodes' reports, also after a takeover.

ALTER TABLE cluster ADD COLUMN lost_generation bigint NOT NULL DEFAULT 0;
