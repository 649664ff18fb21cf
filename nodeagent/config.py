"""The settings of a node agent: a TOML file, overridden by `ISOCHRONE_NODE_*`."""

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from isochrone.service.config import TracesEndpoint, Url
from isochrone.wire.peers import report
from nodeagent.drivers.configured_command import ConfiguredCommand

CANARY_TIMEOUT_S: Final = 20.0
STORE_PORTS_MIN: Final = 4
STORE_PORTS: Final = ((1024, 32_767), (61_000, 65_535))
"""The ports that Mooncake accepts. In place of others it listens at its defaults, which no firewall
for `plaintext_kv_store_ports` protects."""

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Days = Annotated[float, msgspec.Meta(ge=0, le=3650)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
ConfineEngines = Literal["auto", "always", "never"]

OLD_NAMES: Final[dict[str, str]] = {
    "door_host": "listen_host",
    "door_port": "listen_port",
    "door_tls": "listen_tls",
}
"""By its name in the release before: each setting's name. The next release drops the old ones."""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one node. Port 0 means any free port."""

    name: str
    schedulers: tuple[Url, ...]
    state: Path
    join_token_file: Path | None = None  # read at the first start only
    log_level: str = "INFO"  # DEBUG, INFO, WARNING, ERROR or CRITICAL

    # The data-plane server, to which routers and other nodes connect.
    address: Url  # the address that they dial, such as http://10.0.0.7:9000
    listen_host: str = "127.0.0.1"  # where this server itself listens, at `listen_port`
    listen_port: Port = 9000
    listen_tls: bool = False  # mutual TLS with the fleet's certificates
    private_host: str = ""  # a second listener for `/metrics` only, without TLS
    private_port: Port = 0

    # Traces of the requests that routers trace, sent to an OpenTelemetry collector (OTLP over HTTP)
    # such as http://10.0.0.5:4318; and a file (mode 0600) with the value of its `authorization`.
    traces_endpoint: TracesEndpoint = ""
    traces_authorization_file: Path | None = None

    failure_domain: str = ""  # a rack or power feed: nodes of one name fail together
    # First and last port for the rendezvous of replicas that span nodes; each replica led from this
    # node takes one. Without it, this node runs no part of such a replica. The parts then talk in
    # plaintext, on other ports too: the nodes of a PoP need a private network.
    plaintext_rank_ports: tuple[report.Port, report.Port] | None = None
    # Ports of the store of KV that replicas with `share_kv` need on vLLM, or on the embedded engine
    # with `kv_store_bytes`. The first is on loopback,
    # where they find its master; at the others they listen for each other, in plaintext and on
    # every address of the machine: the nodes of a PoP need a private network. Each replica takes
    # three.
    plaintext_kv_store_ports: tuple[report.Port, report.Port] | None = None

    # Engines.
    cpu_memory_bytes: Count = 0  # for replicas without a GPU; 0: 80 % of what the agent may use
    engine_threads: Count = 0  # of an engine on a CPU; 0: one per core that the agent may use
    standby: bool = False  # keep a spare engine process with imports done: halves a cold start
    # Keep engines out of the agent's files and of each other's, with the kernel's Landlock. auto:
    # where the kernel has it; always: or do not start; never.
    confine_engines: ConfineEngines = "auto"
    keep_engines_on_stop: bool = False  # leave engines running when the agent is stopped
    load_timeout_s: Seconds = 1800.0
    drain_timeout_s: Seconds = 30.0
    stall_s: Seconds = 15.0  # an engine with requests and no progress for this long is killed
    canary_interval_s: Seconds = 10.0  # between test requests to an idle engine
    # An engine that leaves a test request unanswered for this long has failed it. Slow devices need
    # longer for a first token. A shorter time finds a hung engine sooner when no request waits for
    # it.
    canary_timeout_s: Seconds = CANARY_TIMEOUT_S
    # Servers of your own that speak OpenAI's API, for deployments with `--driver command --option
    # command=NAME`: `[commands.NAME]` in TOML, with the fields of ConfiguredCommand.
    commands: dict[str, ConfiguredCommand] = {}

    # Artifacts: their sources, and limits on disk and network.
    # Public keys of those who may sign models: PEM files, each named for its owner. If there are
    # any, this node fetches, starts and keeps running only models that one of them has signed.
    model_signers: tuple[Path, ...] = ()
    disk_budget_bytes: Count = 200 * 1024**3
    # Files of LoRA adapters that no request has used for this long are deleted. 0: only for space.
    adapter_idle_days: Days = 7.0
    download_bytes_per_s: Rate = 0.0  # 0: no limit
    upload_bytes_per_s: Rate = 0.0  # to other nodes; 0: no limit
    kv_share_bytes_per_s: Rate = 0.0  # KV to and from other nodes of the PoP; 0: no limit
    kv_share_deployment_bytes_per_s: Rate = 0.0  # of that, for each deployment; 0: no limit
    kv_share_tenant_bytes_per_s: Rate = 0.0  # KV fetched for each tenant; 0: no limit
    uploads_max: Count = 4  # simultaneous uploads to other nodes
    private_sources: bool = False  # allow sources with private addresses or plain http
    hf_url: str = "https://huggingface.co"
    hf_token_file: Path | None = None  # mode 0600; the token is sent to `hf_url` only

    def __post_init__(self) -> None:
        if self.private_port and not self.private_host:
            raise ValueError(
                f"cannot use private_port {self.private_port} without private_host: set it to the"
                " address at which `/metrics` is to be served"
            )
        if self.listen_tls != self.address.startswith("https:"):
            raise ValueError(
                f"cannot use address {self.address!r}: it must begin with https if listen_tls is "
                "set, and with http if it is not"
            )
        for name in ("plaintext_rank_ports", "plaintext_kv_store_ports"):
            ports = getattr(self, name)
            if ports is not None and ports[0] > ports[1]:
                raise ValueError(
                    f"cannot use {name} {ports[0]} to {ports[1]}: the first port must not be above "
                    "the last"
                )
        store_ports = self.plaintext_kv_store_ports
        if store_ports is not None and store_ports[1] - store_ports[0] < STORE_PORTS_MIN - 1:
            raise ValueError(
                f"cannot use plaintext_kv_store_ports {store_ports[0]} to {store_ports[1]}: the "
                f"master needs one and each replica three, so give at least {STORE_PORTS_MIN}"
            )
        if store_ports is not None and not any(
            first <= store_ports[0] and store_ports[1] <= last for first, last in STORE_PORTS
        ):
            allowed = " or ".join(f"{first} to {last}" for first, last in STORE_PORTS)
            raise ValueError(
                f"cannot use plaintext_kv_store_ports {store_ports[0]} to {store_ports[1]}: "
                f"Mooncake would listen at others instead; use ports from {allowed}"
            )
