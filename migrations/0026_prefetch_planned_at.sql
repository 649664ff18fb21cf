-- When the scheduler planned it. No release names this column: a row gets its default.

ALTER TABLE prefetch RENAME COLUMN wished_at TO planned_at;
