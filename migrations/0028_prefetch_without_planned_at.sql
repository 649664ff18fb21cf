-- When the scheduler planned it: nothing reads it, and no release names this column (0026).

ALTER TABLE prefetch DROP COLUMN planned_at;
