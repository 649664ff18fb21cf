"""The router, decision by decision."""
