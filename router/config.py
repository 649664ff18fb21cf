"""What an operator sets of a router, and what bounds it."""

from pathlib import Path
from typing import Annotated

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=2**40)]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from TOML, overridden by `ISOCHRONE_ROUTER_*`.

    `join_token_file` is read once, at the first start. `processes` share the port, 0 is one a core.
    `source_address` is whence nodes are dialled. `private_port` 0 takes any free port; without
    `private_host`, `/metrics` stands on the public listener.
    """

    name: str = ""
    state_folder: Path = Path("/var/lib/isochrone/router")
    schedulers: tuple[str, ...] = ()
    join_token_file: Path | None = None
    processes: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    host: str = "127.0.0.1"
    port: Port = 8080
    private_host: str = ""
    private_port: Port = 0
    source_address: str = ""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    node_tls: bool = False
    log_level: str = "INFO"

    body_bytes_max: Bytes = 8 * 1024 * 1024
    answer_bytes_max: Bytes = 64 * 1024 * 1024
    head_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    connections_max: Count = 20_000
    connections_per_address_max: Count = 5_000
    write_timeout_s: Seconds = 20.0

    connect_timeout_s: Seconds = 3.0
    first_byte_timeout_s: Seconds = 60.0
    stream_idle_timeout_s: Seconds = 15.0
    token_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.25
    attempts_max: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    retry_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    queue_depth_max: Count = 256
    queue_bytes_max: Bytes = 128 * 1024 * 1024
    queue_timeout_s: Seconds = 10.0
    output_tokens_assumed: Count = 256

    probe_interval_s: Seconds = 2.0
    probe_timeout_s: Seconds = 2.0
    demand_interval_s: Seconds = 5.0
    usage_interval_s: Seconds = 1.0
    usage_resend_s: Seconds = 10.0
    spool_bytes_max: Bytes = 64 * 1024 * 1024
    drain_timeout_s: Seconds = 30.0
