"""The admin API and the CLI, on a real Postgres, over real sockets."""
