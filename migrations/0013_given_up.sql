-- What was given up of late, in every picture that placement decides from.
CREATE INDEX placement_failed_idx ON placement (state_since) WHERE state = 'failed';
