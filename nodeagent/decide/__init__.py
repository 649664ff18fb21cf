"""Pure decisions of one node: of its replicas, its requests, its weights."""
