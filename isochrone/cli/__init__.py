"""`isochrone`, the operator's command: a client of the admin API."""
