"""The fleet as a plan reads it: sites, eligible nodes, slots, recent failures."""
