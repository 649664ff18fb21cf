"""Pure decisions of one node: a replica's life, reconciliation, eviction."""
