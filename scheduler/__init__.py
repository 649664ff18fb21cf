"""The scheduler: decides where replicas run, and stores that in Postgres."""
