"""The scheduler on a real Postgres."""
