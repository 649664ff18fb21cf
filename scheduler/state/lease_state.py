"""The lease as this process knows it: whether it acts, under which epoch, and since when.

A renewal is trusted until `lease_ttl_s - MARGIN_S` after it was requested, on this process's own
monotonic clock. The database judges expiry by its clock; `scheduler/store/lease.py` has the rules.
"""

from collections.abc import Callable

from isochrone.wire.ids import Epoch
from scheduler import metrics
from scheduler.store.lease import MARGIN_S, Lease


class NotActing(Exception):
    """Another scheduler acts, or the database cannot be reached."""


class LeaseState:
    """This process's view of the lease. `holder` names the process in the lease's row."""

    def __init__(self, *, holder: str, ttl_s: float, clock: Callable[[], float]) -> None:
        self.holder = holder
        self.ttl_s = ttl_s
        self.clock = clock
        self.last_attempt_at = clock()
        """When the event loop last tried to take or renew the lease."""
        self.free_at = float("-inf")
        """When this standby may take the lease; in the past while another scheduler renews it."""
        self.newest_epoch = Epoch(0)
        """The newest epoch that this process ever held."""
        self._lease: Lease | None = None
        self._acting_since = 0.0
        self._trusted_until = 0.0

    @property
    def is_acting(self) -> bool:
        """Return whether this process may decide now."""
        return self._lease is not None and self.clock() < self._trusted_until

    @property
    def is_held(self) -> bool:
        """Return whether this process took the lease and has not given it up, expired or not."""
        return self._lease is not None

    @property
    def epoch(self) -> Epoch:
        """Return the epoch to write with, or raise NotActing."""
        if self._lease is None or not self.is_acting:
            raise NotActing("this scheduler is not acting")
        return self._lease.epoch

    @property
    def acting_for_s(self) -> float:
        """Return for how long this process has acted; 0 on a standby."""
        if self._lease is None:
            return 0.0
        return self.clock() - self._acting_since

    def take(self, lease: Lease, requested_at: float) -> bool:
        """Hold `lease`, which was requested at `requested_at`; say whether its epoch is new."""
        is_new = self._lease is None or self._lease.epoch != lease.epoch
        self._lease = lease
        self.newest_epoch = max(self.newest_epoch, lease.epoch)
        if is_new:
            # Read once: the database's clock may be set while this process acts.
            self._acting_since = requested_at - max(0.0, lease.acting_for_s)
        self.extend(lease, requested_at)
        metrics.ACTING.set(1)
        metrics.EPOCH.set(lease.epoch)
        return is_new

    def extend(self, lease: Lease, requested_at: float) -> None:
        """Trust the lease for longer if its epoch is the held one; a new epoch needs `take`."""
        lease_held = self._lease
        if lease_held is not None and lease_held.epoch == lease.epoch:
            trusted_until = requested_at + self.ttl_s - MARGIN_S
            self._trusted_until = max(self._trusted_until, trusted_until)

    def drop(self) -> Epoch | None:
        """Hold the lease no longer; return the epoch that was held, if any."""
        lease_held, self._lease = self._lease, None
        metrics.ACTING.set(0)
        return None if lease_held is None else lease_held.epoch
