"""Numbered SQL, forward only; `schema.sql` is the whole schema at head."""
