"""What is served: artifacts, models, engine settings, and the wish that a model be served."""

from typing import Annotated

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
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Sha256 = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{64}}{END}")]


class ArtifactFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an artifact: its path below the artifact's folder, its size and its digest."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    size_bytes: NonNegative
    sha256: Sha256


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files, content-addressed.

    `source` says where they come from: `pypi:package==version/path/in/wheel/`, `hf:owner/name@rev`,
    `https://host/folder/`, or `file:/folder/`. `digest` is the SHA-256 over the sorted manifest and
    names the folder on every node.
    """

    source: Annotated[str, msgspec.Meta(min_length=6, max_length=1024)]
    files: Annotated[tuple[ArtifactFile, ...], msgspec.Meta(min_length=1, max_length=1000)]
    digest: Sha256

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of all files together."""
        return sum(file.size_bytes for file in self.files)


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a million tokens cost, in the operator's own currency.

    Without `cached_per_million`, a cached prompt token costs as much as any other.
    """

    prompt_per_million: Amount = 0.0
    output_per_million: Amount = 0.0
    cached_per_million: Amount | None = None

    def spend(self, prompt: int, cached: int, output: int) -> float:
        """Return what these tokens cost; `cached` are among the `prompt`."""
        cached_price = self.cached_per_million
        if cached_price is None:
            cached_price = self.prompt_per_million
        return (
            (prompt - cached) * self.prompt_per_million
            + cached * cached_price
            + output * self.output_per_million
        ) / 1e6


class ModelDimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes in a model's config that its memory and speed follow from.

    `latent_size` is what attention over a latent (MLA) keeps per token and layer, 0 for heads of
    their own; `sliding_layers` look back no further than `sliding_window` tokens. Bits are those of
    the weights as stored and of the KV cache as kept.
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


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogue entry: what the model is, where its files are, what it needs and costs.

    `kv_bytes_per_token` is what one token of context takes in the KV cache; 0 where not yet known.
    With `shape`, what it needs on any devices is reckoned from its config.
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


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica's engine is started.

    `driver` names a file of nodeagent/drivers. `options` are the driver's own settings, checked by
    the driver on the node, which refuses what it does not know. `devices` are counted over all
    `nodes`, which are of one PoP and have as many each.
    """

    driver: str = "embedded"
    context_tokens_max: Positive = 4096
    kv_memory_bytes: NonNegative = 512 * 1024 * 1024
    tokens_in_flight_max: Positive = 32_768
    devices: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    nodes: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    memory_bytes: NonNegative = 0
    options: dict[str, str] = {}

    @property
    def devices_per_node(self) -> int:
        """Devices on each node."""
        return self.devices // self.nodes


class PlacementPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment asks of its placement.

    `keep_warm` lists PoPs that always hold a replica. `allow` and `deny` name PoPs (`ams`) or
    countries (`NL`); with `allow` empty, everywhere not denied is allowed. `prefill_share` is the
    share of a PoP's replicas that only read prompts, once it has two or more; 0 keeps all unified.
    While one of `replicas_max` is replaced or moved there is one more: nothing ends before what
    takes its place is warm.
    """

    replicas_min: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    replicas_max: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 3
    keep_warm: tuple[PopId, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 50
    prefill_share: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The wish that a model be served, at one version.

    `name` is what clients write as `model`. A change of model or engine settings is a new version.
    `created_at` is Unix time.
    """

    deployment_id: DeploymentId
    name: ModelName
    model_id: ModelId
    version: Positive = 1
    engine: EngineSettings = EngineSettings()
    policy: PlacementPolicy = PlacementPolicy()
    created_at: int = 0
