"""What a scheduler is told at its start: a TOML file, `ISOCHRONE_SCHEDULER_*` over it."""

from pathlib import Path

import msgspec

from isochrone.service.identity import CERTIFICATE_LIFETIME_S
from scheduler.decide.liveness import LivenessLimits


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one scheduler process.

    `authority` is the folder of the cluster's certificate authority; every scheduler of a cluster
    holds the same one. `admin_token_file` holds the bearer token of the admin API, mode 0600.
    `control_tls` serves the control door with a certificate of the authority; `tls_certificate` and
    `tls_key` are the admin API's own. `control_connections_per_address_max` is to be raised where a
    large fleet dials from few addresses; `admissions_per_s` bounds how many peers register in a
    second when a whole fleet dials at once. Peers renew their certificates after two thirds of
    `certificate_lifetime_s`; a third of it is how long a scheduler may be away.
    """

    name: str
    database_url: str
    authority: Path
    admin_token_file: Path
    admin_host: str = "127.0.0.1"
    admin_port: int = 7000
    control_host: str = "127.0.0.1"
    control_port: int = 7001
    control_tls: bool = False
    control_connections_per_address_max: int = 5_000
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    lease_ttl_s: float = 6.0
    lease_renew_s: float = 2.0
    place_interval_s: float = 5.0
    publish_interval_s: float = 2.0
    roll_interval_s: float = 5.0
    hear_first_s: float = 10.0
    admissions_per_s: float = 250.0
    certificate_lifetime_s: float = CERTIFICATE_LIFETIME_S
    event_retention_days: float = 90.0
    liveness: LivenessLimits = LivenessLimits()
    log_level: str = "INFO"
