"""Which LoRA adapter a request means, and where its requests go."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    ReplicaId,
    TenantId,
)
from isochrone.wire.models.model import Artifact, ArtifactFile
from isochrone.wire.peers.adapter import (
    AdapterEntry,
    LoadedAdapters,
    MalformedAdapter,
    RequestAdapter,
    format_loaded_adapters,
    format_request_adapter,
    parse_loaded_adapters,
    parse_request_adapter,
)
from isochrone.wire.peers.routes import DeploymentEntry, KeyTable, RouteTable
from router.decide.routes.adapters import LOAD_BASE_MS, AdapterDirectory, AdapterPlaces
from router.decide.routes.route_directory import RouteDirectory

ARTIFACT = Artifact(
    source="cluster:adapters/ft-1",
    files=(ArtifactFile(path="adapter_config.json", size_bytes=1 << 20, sha256="a" * 64),),
    digest="b" * 64,
)
LLAMA = DeploymentEntry(
    deployment_id=DeploymentId("d"),
    name="llama",
    model_id=ModelId("m"),
    context_tokens=10,
    adapter_rank_max=16,
)


def an_adapter(adapter_id: str, name: str, tenant: str = "acme", **fields: Any) -> AdapterEntry:
    values: dict[str, Any] = {"model_id": ModelId("m"), "rank": 8, "artifact": ARTIFACT, **fields}
    return AdapterEntry(adapter_id=adapter_id, name=name, tenant_id=TenantId(tenant), **values)


@pytest.fixture
def directory() -> AdapterDirectory:
    made = AdapterDirectory()
    made.adopt(
        (
            an_adapter("ft-1", "mine"),
            an_adapter("ft-2", "both"),
            an_adapter("ft-3", "both", "other", is_public=True),
            an_adapter("ft-4", "theirs", "other"),
            an_adapter("ft-5", "elsewhere", model_id=ModelId("m2")),
            an_adapter("ft-6", "open", artifact=None),
            an_adapter("ft-7", "large", rank=32),
            an_adapter("ft-0a", "taken", "late", is_public=True, modified_at=9.0),
            an_adapter("ft-0b", "taken", "slow", is_public=True, modified_at=2.0, artifact=None),
            an_adapter("ft-8", "taken", "other", is_public=True, modified_at=5.0),
        )
    )
    return made


@pytest.mark.parametrize(
    ("name", "tenant", "found"),
    [
        ("mine", "acme", "ft-1"),
        ("ft-1", "acme", "ft-1"),
        ("both", "acme", "ft-2"),
        ("both", "third", "ft-3"),
        ("taken", "third", "ft-8"),
        ("ft-3", "third", "ft-3"),
    ],
)
def test_an_adapter_is_named_by_id_or_name(
    directory: AdapterDirectory, name: str, tenant: str, found: str
) -> None:
    assert directory.find(name, tenant, LLAMA).adapter_id == found


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("theirs", ErrorCode.MODEL_NOT_FOUND, "another tenant's"),
        ("ft-4", ErrorCode.MODEL_NOT_FOUND, "another tenant's"),
        ("none", ErrorCode.MODEL_NOT_FOUND, "does not exist"),
        ("elsewhere", ErrorCode.INVALID_REQUEST, "another base model"),
        ("open", ErrorCode.ADAPTER_INCOMPLETE, "not complete"),
        ("large", ErrorCode.INVALID_REQUEST, "limit of this deployment is 16"),
    ],
)
def test_others_are_refused(
    directory: AdapterDirectory, name: str, code: ErrorCode, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        directory.find(name, "acme", LLAMA)
    assert refused.value.code is code


def test_a_deployment_may_support_none(directory: AdapterDirectory) -> None:
    mock = DeploymentEntry(
        deployment_id=DeploymentId("d"), name="mock", model_id=ModelId("m"), context_tokens=10
    )
    with pytest.raises(ApiError) as refused:
        directory.find("mine", "acme", mock)
    assert refused.value.meaning.number == 5005


def test_where_adapters_are_loaded_is_learned_and_forgotten() -> None:
    places = AdapterPlaces()
    one, two = ReplicaId("r1"), ReplicaId("r2")
    slots = {one: 0, two: 5}
    places.record_sent(one, "ft-1")
    assert places.mask("ft-1", slots) == 1
    places.record_loaded(two, ("ft-1", "ft-2"), 0, 4.0)
    assert places.mask("ft-1", slots) == 1 | 1 << 5
    # The engine of r2 was replaced, and has only what it was asked for since.
    places.record_loaded(two, ("ft-2",), 0, 4.0)
    assert places.mask("ft-1", slots) == 1
    places.record_failed(one, "ft-1")
    assert places.mask("ft-1", slots) == 0
    places.keep_only({one})
    assert not places.replicas_with("ft-2")


def test_the_time_to_load_is_learned() -> None:
    places = AdapterPlaces()
    assumed = places.load_ms(10.0)
    places.record_loaded(ReplicaId("r1"), ("ft-1",), int(LOAD_BASE_MS) + 1000, 10.0)
    assert places.load_ms(10.0) == LOAD_BASE_MS + 1000 > assumed
    # One that was loaded before says nothing.
    places.record_loaded(ReplicaId("r1"), ("ft-1",), 0, 10.0)
    assert places.load_ms(10.0) == LOAD_BASE_MS + 1000


def test_headers_are_read_as_they_were_written() -> None:
    adapter = RequestAdapter(adapter_id="ft-1", model_id="m", artifact=ARTIFACT)
    assert parse_request_adapter(format_request_adapter(adapter)) == adapter
    loaded = LoadedAdapters(120, ("ft-1", "ft-2"))
    assert parse_loaded_adapters(format_loaded_adapters(loaded)) == loaded
    assert parse_loaded_adapters("soon ft-1") is None
    for value in ("", "?", "AAAA", format_request_adapter(adapter)[:-8]):
        with pytest.raises(MalformedAdapter):
            parse_request_adapter(value)


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("llama", "llama"),
        ("llama:mine", "llama"),
        ("llama:v2", "llama:v2"),
        ("llama:v2:mine", "llama:v2"),
        ("other:mine", "other:mine"),
        (":mine", ":mine"),
        ("", ""),
    ],
)
def test_a_model_names_a_deployment_and_perhaps_an_adapter(model: str, base: str) -> None:
    directory = RouteDirectory()
    named_with_colon = msgspec.structs.replace(
        LLAMA, deployment_id=DeploymentId("d2"), name="llama:v2"
    )
    directory.adopt(
        RouteTable(
            cluster_id=ClusterId("c"),
            generation=Generation(1),
            epoch=Epoch(1),
            pops=(),
            deployments=(LLAMA, named_with_colon),
            routes=(),
            keys=KeyTable(),
        )
    )
    assert directory.base_of(model) == base
