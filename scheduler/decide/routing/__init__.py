"""The route table that routers get, and the sources of artifacts that nodes get."""

from scheduler.decide.routing.artifact_sources import ArtifactHolder, rank_sources
from scheduler.decide.routing.flap_damping import DeparturesByReplica, damp_flaps
from scheduler.decide.routing.route_table import (
    build_route_table,
    build_routes,
    keep_unchanged_rates,
    multi_node_hosts,
    replace_node_routes,
)

__all__ = (
    "ArtifactHolder",
    "DeparturesByReplica",
    "build_route_table",
    "build_routes",
    "damp_flaps",
    "keep_unchanged_rates",
    "multi_node_hosts",
    "rank_sources",
    "replace_node_routes",
)
