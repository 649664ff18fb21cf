-- The version of Isochrone with which a peer registered last; empty until it has. Operators see in it
-- how far an upgrade has come.

ALTER TABLE node ADD COLUMN release text NOT NULL DEFAULT '';
ALTER TABLE router ADD COLUMN release text NOT NULL DEFAULT '';
