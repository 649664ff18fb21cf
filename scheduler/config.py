"""The settings of a scheduler: a TOML file, overridden by `ISOCHRONE_SCHEDULER_*`."""

from pathlib import Path
from typing import Annotated

import msgspec

from isochrone.service.config import TracesEndpoint
from isochrone.service.trust.identity import CERTIFICATE_LIFETIME_S
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.membership import LivenessLimits
from scheduler.decide.response_limits import ResponseLimits
from scheduler.store.lease import MARGIN_S

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one scheduler process."""

    name: str
    database_url: str
    authority: Path  # the certificate authority's folder, the same on every scheduler of a cluster
    log_level: str = "INFO"  # DEBUG, INFO, WARNING, ERROR or CRITICAL

    # The admin API.
    admin_token_file: Path  # its bearer token, mode 0600
    admin_host: str = "127.0.0.1"
    admin_port: Port = 7000
    # Names with a dot by which clients reach the admin API, such as a load balancer's; "*" for any.
    # Addresses, localhost and this machine's own names need no entry.
    admin_hosts: tuple[str, ...] = ()
    tls_certificate: Path | None = None  # set both or neither; reloaded when the files change
    tls_key: Path | None = None

    # Spans of admin requests go to `/v1/traces` below this URL of a collector; empty: none do. The
    # content of the file (mode 0600) is sent as the `authorization` header.
    traces_endpoint: TracesEndpoint = ""
    traces_authorization_file: Path | None = None

    # Where agents and routers connect.
    control_host: str = "127.0.0.1"
    control_port: Port = 7001
    control_tls: bool = False  # with a certificate that the authority issues
    # Raise it if a large fleet connects from few addresses.
    control_connections_per_address_max: Annotated[int, msgspec.Meta(ge=1)] = 5_000
    # Connections whose peer has not registered yet, in all and from one network (an IPv4 address or
    # an IPv6 /64). Each may hold a few 64 KiB messages; a registration takes milliseconds.
    unregistered_peers_max: Annotated[int, msgspec.Meta(ge=1)] = 256
    unregistered_peers_per_network_max: Annotated[int, msgspec.Meta(ge=1)] = 128
    admissions_per_s: Positive = 250.0  # registrations a second when a whole fleet connects at once
    # Peers renew certificates after two thirds of this time: schedulers may be down for the rest.
    certificate_lifetime_s: Positive = CERTIFICATE_LIFETIME_S

    # The lease: another scheduler takes over this long after the acting one last renewed it. The
    # acting one stops a second earlier.
    lease_ttl_s: Positive = 6.0
    lease_renew_s: Positive = 2.0
    # How long a new term waits for every node's first report before it places replicas.
    hear_first_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0

    # How often each periodic job runs if nothing nudges it.
    place_interval_s: Positive = 5.0
    publish_interval_s: Positive = 2.0
    roll_interval_s: Positive = 5.0

    # When a silent node counts as lost: `[liveness]` in TOML, with the fields of LivenessLimits.
    liveness: LivenessLimits = LivenessLimits()
    event_retention_days: Positive = 90.0

    # Public keys of those who may sign models: PEM files, each named for its owner. If there are
    # any, a model that none of them has signed cannot be added. Nodes have a setting of their own.
    model_signers: tuple[Path, ...] = ()

    # Files and results of batches (`/v1/files`, `/v1/batches`), for clients of the routers. All
    # schedulers of a cluster share the folder. Without one there are no batches. The limits of a
    # tenant are `[batches]` in TOML, with the fields of BatchLimits.
    batch_folder: Path | None = None

    # An S3-compatible bucket instead of the folder: `s3://bucket/prefix`. Credentials come from the
    # environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or the machine's role. The endpoint is
    # for stores other than AWS's. Files lie in `batch_spool_folder` while they arrive (default: the
    # system's folder for temporary files), which needs space for all files that arrive at the same
    # time.
    batch_bucket: str = ""
    batch_bucket_endpoint: str = ""
    batch_bucket_region: str = ""
    batch_spool_folder: Path | None = None

    batches: BatchLimits = BatchLimits()

    # LoRA adapters that clients upload (`/ai/finetunes`), kept where files of batches are:
    # `[adapters]` in TOML, with the fields of AdapterLimits.
    adapters: AdapterLimits = AdapterLimits()

    # Stored responses and conversations of the public API, in the database: `[responses]` in TOML,
    # with the fields of ResponseLimits. `tenant_bytes_max = 0` stores none.
    responses: ResponseLimits = ResponseLimits()

    def __post_init__(self) -> None:
        if self.liveness.storm_share > 1:
            raise ValueError(
                f"cannot use liveness.storm_share {self.liveness.storm_share:g}: it is a share of"
                " the nodes, from 0 to 1"
            )
        if self.lease_renew_s >= self.lease_ttl_s - MARGIN_S:
            raise ValueError(
                f"cannot use lease_renew_s {self.lease_renew_s:g} with lease_ttl_s"
                f" {self.lease_ttl_s:g}: the lease would expire before it is renewed; a scheduler"
                f" trusts it for {MARGIN_S:g} s less than lease_ttl_s"
            )
