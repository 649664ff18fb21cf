-- The authority of the cluster's certificates, by its fingerprint; empty until a scheduler has told.
-- A scheduler that holds another would issue and show what nobody else in the cluster believes.
ALTER TABLE cluster ADD COLUMN authority text NOT NULL DEFAULT '';
