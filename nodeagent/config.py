"""The settings of a node agent: a TOML file, overridden by `ISOCHRONE_NODE_*`."""

from pathlib import Path
from typing import Annotated

import msgspec

from isochrone.service.config import Url
from isochrone.wire import report

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one node. Port 0 means any free port."""

    name: str
    schedulers: tuple[Url, ...]
    state: Path
    join_token_file: Path | None = None  # read once, at the first start
    log_level: str = "INFO"

    # Where routers and other nodes connect.
    address: Url  # what they dial, as http://10.0.0.7:9000
    door_host: str = "127.0.0.1"
    door_port: Port = 9000
    door_tls: bool = False  # mutual TLS with the fleet's certificates
    private_host: str = ""  # serves `/metrics` too, without TLS
    private_port: Port = 0

    failure_domain: str = ""  # a rack or power feed: what fails together within the PoP
    # First and last port where the parts of replicas over several nodes meet, one per replica led
    # from this node; without them it takes no such part. The parts speak in plaintext, and once
    # they have met on other ports too: the nodes of a PoP need a private network.
    plaintext_rank_ports: tuple[report.Port, report.Port] | None = None

    # What engines may use.
    cpu_memory_bytes: Count = 0  # without a GPU; 0: four fifths of the machine's
    engine_threads: Count = 0  # of a CPU engine; 0: one per core
    standby: bool = False  # keep a process with its imports done: halves a cold start
    keep_engines_on_stop: bool = False  # leave engines running, as when the agent crashes
    load_timeout_s: Seconds = 1800.0
    drain_timeout_s: Seconds = 30.0
    stall_s: Seconds = 15.0  # an engine that has work and makes no token for so long is killed
    canary_interval_s: Seconds = 10.0  # how often an idle engine is asked for a token

    # Weights: sources, and how much disk and network they may use.
    disk_budget_bytes: Count = 200 * 1024**3
    download_bytes_per_s: Rate = 0.0  # 0: no limit
    upload_bytes_per_s: Rate = 0.0
    uploads_max: Count = 4  # to how many peers at once
    private_sources: bool = False  # allow private addresses and plain http, as in a closed network
    hf_url: str = "https://huggingface.co"
    hf_token_file: Path | None = None  # mode 0600; sent to `hf_url` only

    def __post_init__(self) -> None:
        if self.door_tls != self.address.startswith("https:"):
            raise ValueError(
                f"address is {self.address!r}: it begins with https where door_tls is set"
            )
        ports = self.plaintext_rank_ports
        if ports is not None and ports[0] > ports[1]:
            raise ValueError(f"plaintext_rank_ports begin at {ports[0]} and end at {ports[1]}")
