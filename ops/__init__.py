"""Programs and units that an operator runs."""
