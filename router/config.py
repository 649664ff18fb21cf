"""The settings of a router: a TOML file, overridden by `ISOCHRONE_ROUTER_*`."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from isochrone.service.config import TracesEndpoint, Url
from isochrone.wire.ids import END

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=2**40)]
Origin = Annotated[str, msgspec.Meta(pattern=rf"^(\*|https?://[A-Za-z0-9.:\[\]-]{{1,255}})?{END}")]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one router. Port 0 means any free port."""

    name: str = ""  # default: the host name
    state_folder: Path = Path("/var/lib/isochrone/router")
    schedulers: tuple[Url, ...] = ()
    join_token_file: Path | None = None  # read once, at the first start
    log_level: str = "INFO"  # DEBUG, INFO, WARNING, ERROR or CRITICAL

    # The public endpoint, and the limits of one client.
    host: str = "127.0.0.1"
    port: Port = 8080
    processes: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0  # on one port; 0: one per usable core
    tls_certificate: Path | None = None  # set both or neither; reloaded on change
    tls_key: Path | None = None
    # The web pages that may read answers: `https://app.example.net`, or `*` for all; "" for none.
    cors_origin: Origin = ""
    private_host: str = ""  # serves `/metrics`; if empty, the public port does
    private_port: Port = 0
    connections_max: Count = 20_000  # if few are left, those that are idle for longest are closed
    connections_per_address_max: Count = 5_000
    body_bytes_max: Bytes = 8 * 1024 * 1024
    # Uploads (files, and LoRA adapters to `/ai/finetunes`) are kept on disk, in the state folder,
    # until they are relayed: the largest file and the largest adapter, each with the form around
    # it, all of one tenant in a process at once, and all of a process. The scheduler limits the
    # files alone.
    upload_bytes_max: Bytes = 201 * 1024 * 1024
    adapter_bytes_max: Bytes = 501 * 1024 * 1024
    uploads_bytes_per_tenant_max: Bytes = 640 * 1024 * 1024
    uploads_bytes_max: Bytes = 2 * 1024 * 1024 * 1024
    # Sounds to transcribe are kept there while they arrive, and in memory while they are relayed:
    # the largest one, and all of a process at once, of which one tenant alone gets half. Nodes take
    # up to 64 MiB.
    audio_bytes_max: Annotated[int, msgspec.Meta(ge=1024, le=64 * 1024 * 1024)] = 25 * 1024 * 1024
    audio_relayed_bytes_max: Bytes = 512 * 1024 * 1024
    # Unfinished request bodies in memory: of one key, of one client network (an IPv4 address or an
    # IPv6 /64; raise it behind a proxy, whose clients share one), and of all. Divided by the
    # processes, but each can hold one body of body_bytes_max.
    held_bytes_per_key_max: Bytes = 64 * 1024 * 1024
    held_bytes_per_network_max: Bytes = 128 * 1024 * 1024
    held_bytes_max: Bytes = 512 * 1024 * 1024
    # Body bytes of one key that each process parses; compressed bodies count 16 times their
    # inflated size, or 64 times where that is more than 20 times their own. Parsing 8 MiB takes a
    # process 25 to 65 ms, so the default gives one key at most a quarter of it. Raise it if all of
    # your traffic comes with one key.
    parse_bytes_per_key_per_s: Bytes = 32 * 1024 * 1024
    head_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    keepalive_s: Seconds = 75.0  # for an idle connection; a proxy must close it sooner than this
    write_timeout_s: Seconds = 20.0  # a client that does not read for this long is disconnected
    drain_timeout_s: Seconds = 30.0  # time for open requests when the router stops

    # Requests to nodes.
    node_tls: bool = False  # mutual TLS to every node, with the cluster's certificates
    source_address: str = ""  # local address for connections to nodes
    connect_timeout_s: Seconds = 3.0
    first_byte_timeout_s: Seconds = 60.0
    stream_idle_timeout_s: Seconds = 15.0  # then another replica continues the stream
    # While hundreds of tokens a second are relayed and nothing else happens, a process lets them
    # gather for at most this long and wakes up once for all. 0: a wake-up for each token.
    token_gather_ms: Annotated[float, msgspec.Meta(ge=0, le=20)] = 1.5
    # Added to first_byte_timeout_s per output token if the answer is not streamed.
    token_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.25
    answer_bytes_max: Bytes = 64 * 1024 * 1024
    # Three limits of this size, each for a process: complete answers in memory (of one node at most
    # as much as is free); answers that clients have not read (a tenant whose clients leave more
    # unread than is free has its next answer broken off); and bodies of 64 KiB or more whose
    # requests are being answered (a tenant's are refused beyond what is free).
    answers_held_bytes_max: Bytes = 1024 * 1024 * 1024
    attempts_max: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    # The retry budget: retries per request.
    retry_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    # A request with which two engines failed is refused for this long, unless it is changed.
    suspect_refusal_s: Seconds = 600.0
    # The largest image of a chat, by its header: 64 megapixels decode to 192 MB in an engine. All
    # images of a request may have four times as many.
    image_pixels_max: Count = 64_000_000
    # Links to the images of a chat are refused, or fetched by this router (never by an engine):
    # https on port 443 of public addresses, which the router must be able to reach.
    image_links: Literal["refuse", "fetch"] = "refuse"
    output_tokens_assumed: Count = 256  # for a request without max_tokens

    # The queue of requests for which no replica has capacity.
    queue_depth_max: Count = 256
    queue_bytes_max: Bytes = 128 * 1024 * 1024
    queue_timeout_s: Seconds = 10.0

    # How many requests of batches this router runs at once on each replica, with capacity that
    # requests of clients leave free; 0: none. Unset, it follows from the sequences of the engine:
    # all that are free. At most 70 % of a replica's tokens in flight are used either way.
    batch_requests_max: Annotated[int, msgspec.Meta(ge=0, le=256)] | None = None

    # Whether a response of `/v1/responses` is stored if its request does not say so (`store`). At
    # OpenAI it is. Here only requests that ask for it wait for the scheduler and its database.
    store_responses: bool = False
    # How many background responses this router answers at once; 0: none.
    background_responses_max: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 64

    # Traces, sent to an OpenTelemetry collector (OTLP over HTTP) such as http://10.0.0.5:4318.
    # Without an endpoint nothing is traced, and a client's `traceparent` is passed on as it came.
    traces_endpoint: TracesEndpoint = ""
    # Mode 0600: the value of the `authorization` header for the collector.
    traces_authorization_file: Path | None = None
    # The share of requests that are traced.
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    # The sampled flag of a client's `traceparent` decides instead. Turn it off where clients are
    # not trusted with that; their traces are then linked, not continued.
    trace_follows_clients: bool = True

    # Probes of nodes, and reports to the scheduler.
    probe_interval_s: Seconds = 2.0
    probe_timeout_s: Seconds = 2.0
    demand_interval_s: Seconds = 5.0
    usage_interval_s: Seconds = 1.0
    usage_resend_s: Seconds = 10.0  # reports not acknowledged by then are sent again
    spool_bytes_max: Bytes = 64 * 1024 * 1024  # usage on disk while no scheduler is reachable

    def __post_init__(self) -> None:
        if self.private_port and not self.private_host:
            raise ValueError(
                f"cannot use private_port {self.private_port} without private_host: set it to the"
                " address at which `/metrics` is to be served"
            )
        if self.trace_sample_ratio and not self.traces_endpoint:
            raise ValueError(
                f"cannot use trace_sample_ratio {self.trace_sample_ratio} without traces_endpoint:"
                " set it to the address of a collector, such as http://10.0.0.5:4318"
            )
