"""What an operator sets of a router: a TOML file, `ISOCHRONE_ROUTER_*` over it."""

from pathlib import Path
from typing import Annotated

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=2**40)]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router. A port of 0 is any that is free."""

    name: str = ""  # the host's, if not given
    state_folder: Path = Path("/var/lib/isochrone/router")
    schedulers: tuple[str, ...] = ()
    join_token_file: Path | None = None  # read once, at the first start
    log_level: str = "INFO"

    # Where clients ask, and who may hold how much of it.
    host: str = "127.0.0.1"
    port: Port = 8080
    processes: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0  # share the port; 0 is one a core
    tls_certificate: Path | None = None  # both, or neither; read again when they change
    tls_key: Path | None = None
    private_host: str = ""  # of `/metrics`, which without it stands at the public port
    private_port: Port = 0
    connections_max: Count = 20_000
    connections_per_address_max: Count = 5_000
    body_bytes_max: Bytes = 8 * 1024 * 1024
    head_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    write_timeout_s: Seconds = 20.0  # a client that does not read is cut after that
    drain_timeout_s: Seconds = 30.0  # what open requests are given when the router is stopped

    # How nodes are asked.
    node_tls: bool = False  # with the fleet's certificates
    source_address: str = ""  # whence nodes are dialled
    connect_timeout_s: Seconds = 3.0
    first_byte_timeout_s: Seconds = 60.0
    stream_idle_timeout_s: Seconds = 15.0  # then the rest is asked of another
    # An answer that comes whole is waited for so much longer for each of its tokens.
    token_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.25
    answer_bytes_max: Bytes = 64 * 1024 * 1024
    attempts_max: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    # Second attempts are at most this share of first ones.
    retry_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    output_tokens_assumed: Count = 256  # of a request that names no most

    # Who waits for room.
    queue_depth_max: Count = 256
    queue_bytes_max: Bytes = 128 * 1024 * 1024
    queue_timeout_s: Seconds = 10.0

    # What is measured, and told to the scheduler.
    probe_interval_s: Seconds = 2.0
    probe_timeout_s: Seconds = 2.0
    demand_interval_s: Seconds = 5.0
    usage_interval_s: Seconds = 1.0
    usage_resend_s: Seconds = 10.0  # what is not acknowledged by then is sent again
    spool_bytes_max: Bytes = 64 * 1024 * 1024  # usage on disk while no scheduler is there
