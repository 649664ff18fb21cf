"""The admin API of LoRA adapters, whichever tenant they belong to."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from isochrone.wire.admin import AdapterBody, AdapterView, NewAdapterBody, TenantAdaptersView
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import ModelId, TenantId
from isochrone.wire.peers.adapter import ADAPTER_FILES
from scheduler.api.admin.endpoint import AdminRequest, Endpoint, Page, require_found
from scheduler.api.admin.tenants import require_tenant
from scheduler.api.client_objects.adapter_intake import AdapterIntake, NewAdapter, UploadedFile
from scheduler.store.catalogue import EtagMoved
from scheduler.store.client_objects import adapters as store
from scheduler.store.client_objects.adapters import AdapterNodes, StoredAdapter
from scheduler.store.deployments import find_deployment

NODES_SHOWN: Final = 100
KIND: Final = "adapter"


async def list_adapters(request: AdminRequest) -> Page:
    """List the adapters of all tenants, or of one."""
    connection, tenant_id = request.connection, request.query("tenant_id")
    rows = await store.list_adapters(connection, request.after, request.limit + 1, tenant_id)
    views = await _views(request, rows)
    return request.page(views, lambda view: view.adapter_id)


async def read_adapter(request: AdminRequest) -> AdapterView:
    """Read an adapter."""
    found = await store.get_adapter(request.connection, request.name)
    return await _view(request, require_found(found, KIND, request.name))


async def create_adapter(request: AdminRequest) -> AdapterView:
    """Describe an adapter of a tenant for the model of a deployment; its files follow."""
    body: NewAdapterBody = request.body
    if not body.public:
        # No request could use a private adapter of such a tenant.
        await require_tenant(request, body.tenant_id, "cannot add an adapter of")
    found = await find_deployment(request.connection, body.model)
    model = found.name if found is not None else body.model
    new = NewAdapter(body.tenant_id, model, body.name, body.description, body.public)
    view = await _view(request, await _intake(request).add(request.connection, new))
    await request.record("adapter.create", view.adapter_id, after=view)
    return view


async def upload_adapter_file(request: AdminRequest) -> AdapterView:
    """Take one of an adapter's files, as it is. With the second the adapter is complete."""
    uploaded: UploadedFile = request.body
    intake, adapter = _intake(request), await _locked(request)
    taken = await intake.take(request.connection, adapter, request.names["file"], uploaded)
    request.on_commit.append(partial(intake.delete_files, taken.replaced))
    after = await _view(request, taken.adapter)
    await request.record("adapter.upload", after.adapter_id, after=after)
    return after


async def put_adapter_public(request: AdminRequest) -> AdapterView:
    """Let all tenants use an adapter, or its own tenant alone."""
    body: AdapterBody = request.body
    before = await _view(request, await _locked(request))
    changed = await store.set_public(request.connection, before.adapter_id, body.public)
    after = await _view(request, require_found(changed, KIND, request.name))
    await request.record("adapter.put", after.adapter_id, before=before, after=after)
    return after


async def delete_adapter(request: AdminRequest) -> None:
    """Delete an adapter. Requests that run with it end as they would have."""
    adapter = await _locked(request)
    before = await _view(request, adapter)
    await store.delete_adapter(request.connection, adapter.adapter_id)
    if request.context.adapters is not None:
        delete_files = request.context.adapters.delete_files
        request.on_commit.append(partial(delete_files, adapter.files))
    await request.record("adapter.delete", adapter.adapter_id, before=before)


async def list_adapter_tenants(request: AdminRequest) -> Page:
    """List the tenants that have adapters, with what they use of their limits."""
    limits = _intake(request).limits
    rows = await store.list_tenants_with_adapters(
        request.connection, request.after, request.limit + 1
    )
    views = [
        TenantAdaptersView(
            tenant_id=TenantId(row.tenant_id),
            adapters=row.adapters,
            adapters_max=limits.tenant_adapters_max,
            size_bytes=row.size_bytes,
            file_bytes_max=limits.file_bytes_max,
            rank_max=limits.rank_max,
        )
        for row in rows
    ]
    return request.page(views, lambda view: view.tenant_id)


def _intake(request: AdminRequest) -> AdapterIntake:
    """Return the intake of adapters. Raises ApiError if this cluster stores none."""
    intake = request.context.adapters
    if intake is None:
        raise ApiError(
            ErrorCode.CONFLICT,
            "cannot store adapters: set `batch_folder` or `batch_bucket` in the configuration of"
            " all schedulers",
        )
    return intake


async def _locked(request: AdminRequest) -> StoredAdapter:
    """Return the adapter that the path names, locked. Raises EtagMoved and ApiError 404."""
    found = await store.get_adapter(request.connection, request.name, locked=True)
    adapter = require_found(found, KIND, request.name)
    if request.etag not in (None, adapter.etag):
        raise EtagMoved(adapter.adapter_id)
    return adapter


async def _view(request: AdminRequest, adapter: StoredAdapter) -> AdapterView:
    (view,) = await _views(request, [adapter])
    return view


async def _views(request: AdminRequest, adapters: Sequence[StoredAdapter]) -> list[AdapterView]:
    digests = [adapter.digest for adapter in adapters if adapter.digest]
    nodes = await store.nodes_with(request.connection, digests, NODES_SHOWN) if digests else {}
    return [
        _with_nodes(listed, nodes.get(listed.digest or "", AdapterNodes(0, ())))
        for listed in adapters
    ]


def _with_nodes(adapter: StoredAdapter, nodes: AdapterNodes) -> AdapterView:
    present = {file.path for file in adapter.files}
    return AdapterView(
        adapter_id=adapter.adapter_id,
        tenant_id=TenantId(adapter.tenant_id),
        name=adapter.name,
        description=adapter.description,
        model=adapter.model_name,
        model_id=ModelId(adapter.model_id),
        public=adapter.is_public,
        state="complete" if adapter.digest else "incomplete",
        missing_files=tuple(path for path in ADAPTER_FILES if path not in present),
        rank=adapter.rank,
        size_bytes=sum(file.size_bytes for file in adapter.files),
        digest=adapter.digest,
        nodes_total=nodes.total,
        nodes=nodes.first,
        created_at=adapter.created_at,
        modified_at=adapter.modified_at,
        etag=adapter.etag,
    )


_ONE: Final = "/v1/adapters/{adapter_id}"

ADAPTER_ENDPOINTS: Final = (
    Endpoint(
        *("GET", "/v1/adapters", list_adapters, "List LoRA adapters", AdapterView),
        is_list=True,
        query=("tenant_id",),
    ),
    Endpoint(
        *("POST", "/v1/adapters", create_adapter, "Describe a tenant's adapter", AdapterView),
        body=NewAdapterBody,
        status=201,
    ),
    Endpoint("GET", _ONE, read_adapter, "Read an adapter", AdapterView),
    Endpoint(
        *("PUT", f"{_ONE}/files/{{file}}", upload_adapter_file),
        *("Upload a file of an adapter", AdapterView),
        takes_file=True,
    ),
    Endpoint(
        *("PUT", f"{_ONE}/public", put_adapter_public),
        *("Make an adapter public or private", AdapterView, AdapterBody),
    ),
    Endpoint("DELETE", _ONE, delete_adapter, "Delete an adapter", status=204),
    Endpoint(
        *("GET", "/v1/adapter-tenants", list_adapter_tenants),
        *("List tenants with adapters, and their limits", TenantAdaptersView),
        is_list=True,
    ),
)
