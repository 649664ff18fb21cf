"""The LoRA adapters of the route table: which one a request means, and where it is loaded.

Rule 1: a request names an adapter by id or by name. If two have the same name, the tenant's own is
used, else of the public ones for the same model the one that has been complete and public longest.
So no tenant can take a name over from the one whose adapter others use.
Rule 2: a replica that has an adapter loaded is preferred by the time that loading it takes
elsewhere. Until one has, all routers send an adapter's requests to the same of equal replicas.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import ReplicaId
from isochrone.wire.peers.adapter import AdapterEntry
from isochrone.wire.peers.routes import DeploymentEntry
from router.decide.replicas.latency import moving_average

LOAD_BASE_MS: Final = 50.0
"""The fixed time that a node takes to load an adapter of any size."""

MS_PER_MIB: Final = 20.0
"""Assumed until a node has reported how long it took: 50 MiB/s, from the network to the device."""

SIZE_MIB_MIN: Final = 1.0
HOLDERS_MAX: Final = 4
"""How many nodes a request names from which its adapter may be fetched."""


class AdapterDirectory:
    """The adapters of the route table, by the names that a request may use."""

    def __init__(self) -> None:
        self._entries: tuple[AdapterEntry, ...] = ()
        self._by_id: dict[str, AdapterEntry] = {}
        self._by_name: dict[str, list[AdapterEntry]] = {}

    def adopt(self, entries: tuple[AdapterEntry, ...]) -> None:
        """Know these adapters and no others."""
        if entries is self._entries:
            return
        self._entries = entries
        self._by_id = {entry.adapter_id: entry for entry in entries}
        self._by_name = {}
        for entry in sorted(entries, key=lambda one: (one.artifact is None, one.modified_at)):
            self._by_name.setdefault(entry.name, []).append(entry)

    def find(self, name: str, tenant_id: str, deployment: DeploymentEntry) -> AdapterEntry:
        """Return the adapter that a tenant's request for a deployment names. Raises ApiError."""
        if not deployment.adapter_rank_max:
            raise ApiError(
                ErrorCode.ADAPTERS_UNSUPPORTED,
                f"cannot use the adapter {name!r}: the model {deployment.name!r} does not support"
                " LoRA",
                param="model",
                headers={"allow": "POST"},
            )
        named = self._by_id.get(name)
        candidates = [named] if named is not None else self._by_name.get(name, [])
        usable = [
            adapter for adapter in candidates if adapter.is_public or adapter.tenant_id == tenant_id
        ]
        fitting = [adapter for adapter in usable if adapter.model_id == deployment.model_id]
        own = [adapter for adapter in fitting if adapter.tenant_id == tenant_id]
        entry = next(iter((*own, *fitting, *usable)), None)
        if entry is None:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"cannot find the adapter {name!r}: it does not exist or is another tenant's",
                param="model",
            )
        _check(entry, deployment)
        return entry


def _check(entry: AdapterEntry, deployment: DeploymentEntry) -> None:
    """Raise ApiError if an adapter cannot be used with a deployment."""
    if entry.model_id != deployment.model_id:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use the adapter {entry.name!r} with {deployment.name!r}: it was made for"
            f" another base model ({entry.model_id!r}, not {deployment.model_id!r})",
            param="model",
        )
    if entry.artifact is None:
        raise ApiError(
            ErrorCode.ADAPTER_INCOMPLETE,
            f"cannot use the adapter {entry.name!r}: its files are not complete; upload"
            " adapter_config.json and adapter_model.safetensors",
            param="model",
        )
    if entry.rank > deployment.adapter_rank_max:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use the adapter {entry.name!r} with {deployment.name!r}: its rank is"
            f" {entry.rank}, the limit of this deployment is {deployment.adapter_rank_max}",
            param="model",
        )


class AdapterPlaces:
    """The replicas that have loaded each adapter of one deployment, as far as this router knows."""

    def __init__(self) -> None:
        self._loaded: dict[ReplicaId, set[str]] = {}
        self._replicas: dict[str, set[ReplicaId]] = {}
        self._ms_per_mib: float | None = None

    def replicas_with(self, adapter_id: str) -> Collection[ReplicaId]:
        """Return the replicas that have an adapter loaded, or are loading it."""
        return self._replicas.get(adapter_id, ())

    def mask(self, adapter_id: str, slots: Mapping[ReplicaId, int]) -> int:
        """Return the slots of these replicas, as bits."""
        mask = 0
        for replica_id in self.replicas_with(adapter_id):
            slot = slots.get(replica_id, -1)
            if slot >= 0:
                mask |= 1 << slot
        return mask

    def load_ms(self, size_mib: float) -> float:
        """Return how long it takes to load an adapter where it is not."""
        rate = self._ms_per_mib if self._ms_per_mib is not None else MS_PER_MIB
        return LOAD_BASE_MS + size_mib * rate

    def record_sent(self, replica_id: ReplicaId, adapter_id: str) -> None:
        """Note that a replica is sent a request with an adapter, which it loads for that."""
        self._loaded.setdefault(replica_id, set()).add(adapter_id)
        self._replicas.setdefault(adapter_id, set()).add(replica_id)

    def record_failed(self, replica_id: ReplicaId, adapter_id: str) -> None:
        """Note that a replica may not have loaded an adapter."""
        self._loaded.get(replica_id, set()).discard(adapter_id)
        self._forget(adapter_id, replica_id)

    def record_loaded(
        self, replica_id: ReplicaId, adapter_ids: Iterable[str], load_ms: int, size_mib: float
    ) -> None:
        """Note all adapters that a replica has loaded; that of `size_mib` took `load_ms`."""
        after = set(adapter_ids)
        for adapter_id in self._loaded.get(replica_id, set()) - after:
            self._forget(adapter_id, replica_id)
        for adapter_id in after:
            self._replicas.setdefault(adapter_id, set()).add(replica_id)
        self._loaded[replica_id] = after
        if load_ms > LOAD_BASE_MS:
            sample = (load_ms - LOAD_BASE_MS) / max(SIZE_MIB_MIN, size_mib)
            self._ms_per_mib = moving_average(self._ms_per_mib, sample)

    def keep_only(self, replica_ids: Collection[ReplicaId]) -> None:
        """Forget replicas that have left the route table."""
        for replica_id in [known_id for known_id in self._loaded if known_id not in replica_ids]:
            for adapter_id in self._loaded.pop(replica_id):
                self._forget(adapter_id, replica_id)

    def _forget(self, adapter_id: str, replica_id: ReplicaId) -> None:
        replicas = self._replicas.get(adapter_id)
        if replicas is not None:
            replicas.discard(replica_id)
            if not replicas:
                del self._replicas[adapter_id]
