"""The centre: decides where replicas live and remembers it in Postgres."""
