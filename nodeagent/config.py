"""What a node agent is told at its start: a TOML file, `ISOCHRONE_NODE_*` over it."""

from pathlib import Path
from typing import Annotated

import msgspec

from isochrone.wire import report

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one node. A port of 0 is any that is free."""

    name: str
    schedulers: tuple[str, ...]
    state: Path
    join_token_file: Path | None = None  # read once, at the first start
    log_level: str = "INFO"

    # Where routers and the other nodes ask.
    address: str  # what they dial, as http://10.0.0.7:9000
    door_host: str = "127.0.0.1"
    door_port: Port = 9000
    door_tls: bool = False  # with the fleet's certificates, of both ends
    private_host: str = ""  # `/metrics` stands there too, without TLS
    private_port: Port = 0

    failure_domain: str = ""  # a rack, a power feed: what fails together in one PoP
    # First and last of the ports where parts of replicas over several nodes meet, each replica led
    # from here taking one; without them this node takes no such part. The parts speak in plain and,
    # once they have met, on other ports too: the nodes of a PoP need a network of their own.
    plaintext_rank_ports: tuple[report.Port, report.Port] | None = None

    # What engines may have.
    cpu_memory_bytes: Count = 0  # where there is no GPU; 0 is four fifths of the machine
    engine_threads: Count = 0  # of a CPU engine; 0 is one a core
    standby: bool = False  # keep a process with its imports done: half of a cold start
    keep_engines_on_stop: bool = False  # an agent that is stopped leaves them to its next life
    load_timeout_s: Seconds = 1800.0
    drain_timeout_s: Seconds = 30.0
    stall_s: Seconds = 15.0  # an engine that makes no tokens for so long is ended
    canary_interval_s: Seconds = 10.0  # how often an idle one is asked for a token

    # Weights: whence, and how much of disk and network.
    disk_budget_bytes: Count = 200 * 1024**3
    download_bytes_per_s: Rate = 0.0  # 0 for no bound
    upload_bytes_per_s: Rate = 0.0
    uploads_max: Count = 4  # to so many peers at once
    private_sources: bool = False  # private addresses and plain http, as in a closed network
    hf_url: str = "https://huggingface.co"
    hf_token_file: Path | None = None  # mode 0600; shown to `hf_url` alone

    def __post_init__(self) -> None:
        ports = self.plaintext_rank_ports
        if ports is not None and ports[0] > ports[1]:
            raise ValueError(f"plaintext_rank_ports begin at {ports[0]} and end at {ports[1]}")
