"""What a node agent is told at its start: a TOML file, `ISOCHRONE_NODE_*` over it."""

from pathlib import Path

import msgspec

from isochrone.wire.report import Port


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one node.

    `address` is what routers dial (`http://10.0.0.7:9000`). With `private_host`, `/metrics` stands
    there too, without TLS. `join_token_file` is read once, at the first start. `cpu_memory_bytes`
    is what replicas may use where there is no GPU; 0 means four fifths of the machine.
    `private_sources` lets artifacts come from private addresses and plain http, as inside a closed
    network. The token in `hf_token_file` (mode 0600, read at the start) is shown to `hf_url` alone,
    for models that are gated there. `upload_bytes_per_s` and `download_bytes_per_s` bound what
    artifacts take of the network, 0 for no bound; `uploads_max` is how many peers fetch at once.
    Nodes of one PoP that fail together (a rack, a power feed) are given one `failure_domain`.
    `plaintext_rank_ports`, first and last, lets this node hold parts of replicas over several
    nodes. The parts speak to one another in plain and, once they have met, on other ports too: the
    nodes of a PoP must have a network of their own. Each replica led from here takes one port.
    """

    name: str
    schedulers: tuple[str, ...]
    state: Path
    address: str
    door_host: str = "127.0.0.1"
    door_port: int = 9000
    door_tls: bool = False
    private_host: str = ""
    private_port: int = 0
    failure_domain: str = ""
    plaintext_rank_ports: tuple[Port, Port] | None = None
    join_token_file: Path | None = None
    cpu_memory_bytes: int = 0
    engine_threads: int = 0
    standby: bool = False
    disk_budget_bytes: int = 200 * 1024**3
    private_sources: bool = False
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    uploads_max: int = 4
    hf_url: str = "https://huggingface.co"
    hf_token_file: Path | None = None
    keep_engines_on_stop: bool = False
    load_timeout_s: float = 1800.0
    drain_timeout_s: float = 30.0
    stall_s: float = 15.0
    canary_interval_s: float = 10.0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        ports = self.plaintext_rank_ports
        if ports is not None and ports[0] > ports[1]:
            raise ValueError(f"plaintext_rank_ports begin at {ports[0]} and end at {ports[1]}")
