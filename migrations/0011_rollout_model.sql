-- The model that a rollout on its way is bound for stays in the catalogue until it has arrived, or was
-- called off.
ALTER TABLE rollout
    ADD COLUMN bound_for text GENERATED ALWAYS AS (
        CASE WHEN state IN ('running', 'paused') THEN spec ->> 'model_id' END
    ) STORED;
ALTER TABLE rollout
    ADD CONSTRAINT rollout_bound_for_fkey FOREIGN KEY (bound_for) REFERENCES model NOT VALID;
