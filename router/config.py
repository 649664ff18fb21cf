"""The settings of a router: a TOML file, overridden by `ISOCHRONE_ROUTER_*`."""

from pathlib import Path
from typing import Annotated

import msgspec

from isochrone.service.config import Url

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=2**40)]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router. Port 0 means any free port."""

    name: str = ""  # default: the host's name
    state_folder: Path = Path("/var/lib/isochrone/router")
    schedulers: tuple[Url, ...] = ()
    join_token_file: Path | None = None  # read once, at the first start
    log_level: str = "INFO"

    # The public endpoint, and how much a client may hold of it.
    host: str = "127.0.0.1"
    port: Port = 8080
    processes: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0  # share the port; 0: one per core
    tls_certificate: Path | None = None  # set both or neither; reloaded on change
    tls_key: Path | None = None
    private_host: str = ""  # where `/metrics` is served; without it, at the public port
    private_port: Port = 0
    connections_max: Count = 20_000
    connections_per_address_max: Count = 5_000
    body_bytes_max: Bytes = 8 * 1024 * 1024
    head_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    write_timeout_s: Seconds = 20.0  # a client that does not read for so long is cut
    drain_timeout_s: Seconds = 30.0  # how long open requests may take once the router is stopped

    # Requests to nodes.
    node_tls: bool = False  # to every node, with the fleet's certificates
    source_address: str = ""  # the local address to dial nodes from
    connect_timeout_s: Seconds = 3.0
    first_byte_timeout_s: Seconds = 60.0
    stream_idle_timeout_s: Seconds = 15.0  # then another replica continues the stream
    # Added to first_byte_timeout_s per output token where the answer comes whole.
    token_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.25
    answer_bytes_max: Bytes = 64 * 1024 * 1024
    attempts_max: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    # The retry budget: retries per first attempt.
    retry_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    output_tokens_assumed: Count = 256  # for a request without a maximum of its own

    # The queue for requests that find every replica full.
    queue_depth_max: Count = 256
    queue_bytes_max: Bytes = 128 * 1024 * 1024
    queue_timeout_s: Seconds = 10.0

    # Probes of nodes, and what is reported to the scheduler.
    probe_interval_s: Seconds = 2.0
    probe_timeout_s: Seconds = 2.0
    demand_interval_s: Seconds = 5.0
    usage_interval_s: Seconds = 1.0
    usage_resend_s: Seconds = 10.0  # usage not acknowledged by then is sent again
    spool_bytes_max: Bytes = 64 * 1024 * 1024  # usage on disk while no scheduler is reachable
