"""Numbered SQL, forward only; `schema.sql` is the whole current schema."""
