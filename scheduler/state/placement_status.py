"""The last plan's problems: why placement is frozen, and which requirements are unmet."""

from collections.abc import Sequence

from scheduler.decide.cluster import UnmetRequirement


class PlacementStatus:
    """Written by the placement job, read by the admin API."""

    def __init__(self) -> None:
        self.frozen = ""
        """Why nothing may be moved now; empty if it may."""
        self.unmet: Sequence[UnmetRequirement] = ()
        self.unreadable: Sequence[str] = ()
        """Rows of the store that cannot be read and belong to no deployment, in words."""
