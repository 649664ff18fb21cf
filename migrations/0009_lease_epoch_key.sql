-- A writer holds the epoch (`FOR KEY SHARE`) until it commits. As a key, the epoch cannot be changed
-- meanwhile, and the lease can still be renewed: that changes no key, so it waits for no writer.
ALTER TABLE lease ADD CONSTRAINT lease_epoch_key UNIQUE (epoch);
