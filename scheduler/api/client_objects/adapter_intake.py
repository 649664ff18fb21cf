"""Takes new LoRA adapters and their files, uploaded by a tenant or an operator.

An adapter is described first; then its two files are uploaded, in any order. When both are there
and fit each other and the base model, the adapter is complete: from then on it can be used and its
files never change.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple

from isochrone.wire.engines.adapter_rank import adapter_rank_max
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.models.adapter_files import (
    CONFIG_BYTES_MAX,
    LENGTH_BYTES,
    AdapterConfig,
    BadAdapter,
    TensorShapes,
    header_length,
    read_adapter_config,
    read_tensor_shapes,
)
from isochrone.wire.models.model import ModelDimensions
from isochrone.wire.peers.adapter import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE
from scheduler.api.client_objects.uploads import ReadChunk, add_or_discard, write_upload
from scheduler.decide.adapter_fit import check_adapter
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.catalogue import get_model
from scheduler.store.client_objects.adapters import (
    AdapterFile,
    StoredAdapter,
    add_adapter,
    has_adapter_file,
    lock_tenant_adapters,
    set_files,
)
from scheduler.store.deployments import get_deployment_by_name
from scheduler.store.pool import Connection, Pool

NAMES: Final = " and ".join(ADAPTER_FILES)
RESERVED_NAME: Final = "public"
"""An adapter of this name could not be deleted by it: `/ai/finetunes/public` is a list."""


class UploadedFile(NamedTuple):
    """A file that was stored."""

    file_id: str
    size_bytes: int
    sha256: str


class TakenFile(NamedTuple):
    """An adapter after a file was added, and the files that this replaced."""

    adapter: StoredAdapter
    replaced: list[AdapterFile]


Adding = Coroutine[Any, Any, TakenFile]


class NewAdapter(NamedTuple):
    """The description of an adapter for the model of the deployment `model`."""

    tenant_id: str
    model: str
    name: str
    description: str
    is_public: bool


class AdapterIntake:
    """Checks and stores adapters within limits. Files lie in `folder`."""

    def __init__(self, folder: BatchFolder, limits: AdapterLimits) -> None:
        self.limits = limits
        self._folder = folder

    async def add(self, connection: Connection, new: NewAdapter) -> StoredAdapter:
        """Describe an adapter. Raises ApiError."""
        if new.name == RESERVED_NAME:
            reason = f"{RESERVED_NAME!r} is the path of the public adapters; choose another"
            raise ApiError(
                ErrorCode.INVALID_REQUEST, f"cannot use field 'name': {reason}", param="name"
            )
        deployment = await get_deployment_by_name(connection, new.model)
        if deployment is None:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND, f"cannot find the model {new.model!r}", param="model"
            )
        stored = await get_model(connection, deployment.model_id)
        kind = stored.model.kind if stored is not None else "chat"
        if not adapter_rank_max(deployment.engine, kind):
            raise ApiError(
                ErrorCode.ADAPTERS_UNSUPPORTED,
                f"cannot add an adapter: the model {new.model!r} does not support LoRA",
                param="model",
                headers={"allow": "GET"},
            )
        count = await lock_tenant_adapters(connection, new.tenant_id)
        if count >= self.limits.tenant_adapters_max:
            raise ApiError(
                ErrorCode.QUOTA_EXCEEDED,
                f"cannot add an adapter: this tenant has {count} of"
                f" {self.limits.tenant_adapters_max}; delete one",
            )
        added = await add_adapter(
            connection,
            StoredAdapter(
                adapter_id=f"ft-{secrets.token_hex(12)}",
                tenant_id=new.tenant_id,
                name=new.name,
                description=new.description.replace("\0", ""),
                model_id=deployment.model_id,
                model_name=new.model,
                is_public=new.is_public,
                rank=0,
                files=(),
                source="",
                digest=None,
                created_at=0.0,
                modified_at=0.0,
            ),
        )
        if added is None:
            raise ApiError(
                ErrorCode.CONFLICT,
                f"cannot add an adapter {new.name!r}: this tenant has one of that name",
                param="name",
            )
        return added

    async def write(self, tenant_id: str, read_chunk: ReadChunk) -> UploadedFile:
        """Write a tenant's file to the folder while it arrives. Raises ApiError."""
        file_id = f"adapter-{secrets.token_hex(12)}"
        digest = hashlib.sha256()
        size_bytes = await write_upload(
            self._folder.of_tenant(tenant_id),
            file_id,
            read_chunk,
            bytes_max=self.limits.file_bytes_max,
            on_chunk=digest.update,
        )
        return UploadedFile(file_id, size_bytes, digest.hexdigest())

    async def take(
        self, connection: Connection, adapter: StoredAdapter, name: str, uploaded: UploadedFile
    ) -> TakenFile:
        """Make an uploaded file one of a locked adapter's. Raises ApiError if it cannot be."""
        refuse_complete(adapter)
        if name not in ADAPTER_FILES:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use a file {name[:80]!r}: an adapter has the files {NAMES}",
                param="file",
            )
        new = AdapterFile(
            path=name,
            size_bytes=uploaded.size_bytes,
            sha256=uploaded.sha256,
            file_id=uploaded.file_id,
        )
        others = [file for file in adapter.files if file.path != name]
        files = tuple(sorted((*others, new), key=lambda file: file.path))
        rank = await self._check(connection, adapter, files)
        stored = await set_files(connection, adapter, files, rank)
        return TakenFile(stored, [file for file in adapter.files if file.path == name])

    def transaction_turn(self, tenant_id: str) -> AbstractAsyncContextManager[None]:
        """Wait until a transaction of a tenant may `take` a file. Raises ApiError 503."""
        return self._folder.of_tenant(tenant_id).transaction_turn()

    async def discard(self, uploaded: UploadedFile) -> None:
        """Delete an uploaded file that no adapter has."""
        await self._folder.discard(uploaded.file_id)

    async def add_or_discard(self, pool: Pool, uploaded: UploadedFile, adding: Adding) -> TakenFile:
        """Return the result of `adding`, which makes a file an adapter's; else delete the file."""
        return await add_or_discard(
            pool, self._folder, uploaded.file_id, adding, has_row=has_adapter_file
        )

    async def delete_files(self, files: Sequence[AdapterFile]) -> None:
        """Delete the files that an adapter had."""
        for file in files:
            if file.file_id:
                await self._folder.discard(file.file_id)

    async def _check(
        self,
        connection: Connection,
        adapter: StoredAdapter,
        files: Sequence[AdapterFile],
    ) -> int:
        """Check what is there of an adapter; return its rank if it is complete, else 0."""
        folder = self._folder.of_tenant(adapter.tenant_id)
        stored = await get_model(connection, adapter.model_id)
        shape = stored.model.shape if stored is not None else None
        try:
            starts = {
                file.path: (await folder.run_briefly(self._read_start, file), file.size_bytes)
                for file in files
            }
            # In a thread: a header with 40,000 tensors takes a tenth of a second.
            return await asyncio.to_thread(_checked_rank, starts, shape, self.limits.rank_max)
        except BadAdapter as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error), param="file") from error

    def _read_start(self, file: AdapterFile) -> bytes:
        """Return the beginning of a file, of weights at least the header. Raises BadAdapter."""
        try:
            with self._folder.open(file.file_id) as source:
                start = bytearray(source.read(CONFIG_BYTES_MAX))
                if file.path == WEIGHTS_FILE:
                    length = LENGTH_BYTES + header_length(bytes(start))
                    start += source.read(max(0, length - len(start)))
        except FileNotFoundError:
            raise ApiError(
                ErrorCode.CONFLICT, f"cannot find {file.path} any more: upload it again"
            ) from None
        return bytes(start)


def _checked_rank(
    starts: Mapping[str, tuple[bytes, int]], shape: ModelDimensions | None, rank_max: int
) -> int:
    """Check the files that are there, given their beginnings and sizes; return the rank of a
    complete adapter, else 0. Raises BadAdapter."""
    config: AdapterConfig | None = None
    shapes: TensorShapes | None = None
    if CONFIG_FILE in starts:
        start, size_bytes = starts[CONFIG_FILE]
        if size_bytes > CONFIG_BYTES_MAX:
            raise BadAdapter(f"cannot read a config of {size_bytes} bytes")
        config = read_adapter_config(start)
        check_rank(config, rank_max)
    if WEIGHTS_FILE in starts:
        shapes = read_tensor_shapes(*starts[WEIGHTS_FILE])
    if config is None or shapes is None:
        return 0
    check_adapter(config, shapes, shape)
    return config.r


def check_rank(config: AdapterConfig, rank_max: int) -> None:
    """Raise BadAdapter if an adapter's rank is above the limit."""
    if config.r > rank_max:
        raise BadAdapter(f"cannot use an adapter of rank {config.r}: the limit is {rank_max}")


def refuse_complete(adapter: StoredAdapter) -> None:
    """Raise ApiError if an adapter's files may no longer change."""
    if adapter.digest is not None:
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot change the adapter {adapter.name!r}: its files are complete; make a new one",
        )
