"""The rows of the fleet: nodes, their reports, placements, identities."""
