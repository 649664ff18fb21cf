-- Placements past their retention are looked for every few minutes, mostly in vain: without this, each
-- time among all placements of a week.

CREATE INDEX placement_by_release ON placement (released_at) WHERE released_at IS NOT NULL;
