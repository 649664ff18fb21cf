"""The node agent: makes the replicas of one server match its assignment."""
